"""Pictures that come with a request."""

import io
from typing import TYPE_CHECKING

from services.common.errors import InvalidInput
from services.dit.config import DitSettings

if TYPE_CHECKING:
    from PIL.Image import Image


def decode_picture(data: bytes, field: str, limits: DitSettings) -> "Image":
    """The picture upright in RGB; transparent parts on white; of an animation the first frame.

    Raises:
        InvalidInput: names `field`, when the file is no picture, too large or too small.
    """
    from PIL import Image

    picture = _open(data, field, limits)
    if "A" in picture.getbands() or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        ground = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(ground, picture)
    return picture.convert("RGB")


def decode_mask(data: bytes, field: str, of: "Image", limits: DitSettings) -> "Image":
    """The mask of `of` in grey: white where the file is transparent, or without alpha channel where it is white.

    Raises:
        InvalidInput: names `field`, when the file is no picture or of another size.
    """
    from PIL import ImageOps

    mask = _open(data, field, limits)
    if mask.size != of.size:
        sizes = f"{mask.size[0]} x {mask.size[1]}, the picture {of.size[0]} x {of.size[1]}"
        raise InvalidInput(field, f"is {sizes}; they must be the same")
    if "A" in mask.getbands():
        return ImageOps.invert(mask.getchannel("A"))
    return mask.convert("L")


def _open(data: bytes, field: str, limits: DitSettings) -> "Image":
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            if width * height > limits.max_image_pixels:
                raise InvalidInput(field, f"is {width} x {height}; at most {limits.max_image_pixels} pixels are taken")
            if min(width, height) < limits.min_image_side:
                raise InvalidInput(
                    field, f"is {width} x {height}; each side must have at least {limits.min_image_side} pixels"
                )
            image.load()
            return ImageOps.exif_transpose(image)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidInput(field, f"cannot be decoded as an image: {error}") from None
