"""Limits of images, for gateway and stages alike."""

# Image processors guess which side of an array is the channels: they can mistake an image of 1 or 3 pixels.
MIN_IMAGE_SIDE = 4
