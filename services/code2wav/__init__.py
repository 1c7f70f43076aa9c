"""code2wav: codec frames in, sound out, sample-exact for any split of the frames."""
