"""code2wav: codec frames in, sound out, sample-exact however the frames are split."""
