"""Encodes pictures as files. Blocking: call these in a thread."""

import io
from typing import Any, Literal

import numpy as np
from PIL import Image

PictureFormat = Literal["png", "jpeg", "webp"]
# Largest width and height that the encoders write.
MAX_SIDE_PIXELS: dict[PictureFormat, int] = {"png": 2**31 - 1, "jpeg": 65_500, "webp": 16_383}
_FULL_COLOUR_FROM = 90  # quality from which a JPEG keeps its colours at full resolution


def encode_picture(pixels: np.ndarray, file_format: PictureFormat, quality: int) -> bytes:
    """A picture's file.

    Args:
        pixels: (height, width, 3) uint8, red, green, blue.
        file_format: PNG keeps every pixel.
        quality: 0 to 100, of JPEG and WebP; 100 is the best.
    """
    options: dict[str, Any] = {}
    if file_format == "jpeg":
        options = {"quality": max(1, quality), "subsampling": 0 if quality >= _FULL_COLOUR_FROM else 2}
    elif file_format == "webp":
        options = {"quality": quality}
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, file_format, **options)
    return file.getvalue()
