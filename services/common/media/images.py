"""The decoder of images. Pillow is imported where it is used: not all who know the limits have it."""

import io
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from services.common.media import TOO_LARGE, MediaError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MIN_SIDE = 4
"""Image processors guess which side of an array is the channels: they can mistake an image of 1 or 3 pixels."""

_ORIENTATION = 0x0112
_JPEG_END = b"\xff\xd9"
# More of a scan, with all marks of restarts. Nothing of it is seen behind a scan that is whole.
_MORE_SCAN = b"".join(bytes((*range(254, 60, -7), 0xFF, 0xD0 + i)) for i in range(8))
# By Pillow's raw mode: the transparent colour that a PNG names, times this, is the one that Pillow decodes.
_TRANSPARENT_SCALES = {"L;2": 85.0, "L;4": 17.0, "RGB;16B": 1 / 256}


@contextmanager
def open_image(data: bytes, max_pixels: int) -> "Generator[ImageFile]":
    """The image in `data`, of which only the header has been read.

    Raises:
        MediaError: `data` is no image, larger or smaller than may be, or its use in the block found it broken.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow's limit, and of metadata that nobody reads
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(image, max_pixels)
                yield image
    except MediaError:
        raise
    except MemoryError:
        raise MediaError(TOO_LARGE) from None
    except Image.DecompressionBombError:
        raise MediaError(f"the image has more pixels than the {max_pixels} allowed") from None
    except Exception:  # Pillow's readers raise whatever their parsing runs into
        formats = ", ".join(FORMATS)
        raise MediaError(f"the file is corrupt or cut off, or is no image of these formats: {formats}") from None


def decode_image(data: bytes, max_pixels: int) -> "Image":
    """The image as viewers show it: upright, in RGB of 8 bits, on white, of an animation the first frame.

    Nothing of the file's metadata is left, so that nobody turns it again.

    Raises:
        MediaError: as of `open_image`.
    """
    from PIL import Image

    image = decode_channels(data, max_pixels)
    ground = Image.new("RGB", image.size, "white")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        ground.paste(image, mask=image)
    else:
        ground.paste(image)
    return ground


def decode_channels(data: bytes, max_pixels: int) -> "Image":
    """The image upright, in 8 bits a channel, with its alpha channel or transparent colour. Raises MediaError."""
    with open_image(data, max_pixels) as image:
        scale = _TRANSPARENT_SCALES.get(str(image.tile[0].args), 1.0) if image.tile else 1.0
        decoded = _loaded(image, data)
        match decoded.info.get("transparency"):
            case int(grey):
                decoded.info["transparency"] = int(grey * scale)
            case tuple(colour):
                decoded.info["transparency"] = tuple(int(value * scale) for value in colour)
        return _upright(_eight_bit(decoded), _orientation(decoded))


def decode_mask(data: bytes, max_pixels: int) -> "Image":
    """In grey: white where the file is transparent, or without alpha channel where it is white. Raises MediaError."""
    from PIL import ImageOps

    mask = decode_channels(data, max_pixels)
    if mask.has_transparency_data:
        return ImageOps.invert(mask.convert("RGBA").getchannel("A"))
    return mask.convert("L")


def _check_size(image: "Image", max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise MediaError(f"{width} x {height} pixels are more than the {max_pixels} allowed")
    if min(width, height) < MIN_SIDE:
        raise MediaError(f"the image is {width} x {height} pixels; each side must be at least {MIN_SIDE}")


def _loaded(image: "ImageFile", data: bytes) -> "ImageFile":
    """`image` decoded. Cameras write JPEGs without an end mark: these are whole if no further data changes them."""
    from PIL import Image, ImageChops

    try:
        image.load()
        return image
    except OSError:
        if image.format not in ("JPEG", "MPO"):
            raise
    ended = Image.open(io.BytesIO(data + _JPEG_END), formats=("JPEG",))
    stuffed = b"\0" if data.endswith(b"\xff") else b""  # or its last byte begins a mark
    longer = Image.open(io.BytesIO(data + stuffed + _MORE_SCAN + _JPEG_END), formats=("JPEG",))
    if ImageChops.difference(ended, longer).getbbox() is not None:
        raise MediaError("the file is cut off: send it whole")
    return ended


def _orientation(image: "Image") -> object:
    """As the file says it; None if what it says cannot be read: that is no fault of the picture."""
    try:
        return image.getexif().get(_ORIENTATION)
    except Exception:  # Pillow raises whatever its parsing of a damaged block runs into
        return None


def _upright(image: "Image", orientation: object) -> "Image":
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _eight_bit(image: "Image") -> "Image":
    """Grey of 16 bits, which Pillow would clip to 255, as 8 bits: the high byte, as Pillow takes it of colours."""
    if not image.mode.startswith("I"):
        return image
    import numpy as np
    from PIL import Image

    values = np.asarray(image).clip(0, 65535)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    if (transparent := image.info.get("transparency")) is not None:
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey
