"""The dit beside diffusers."""
