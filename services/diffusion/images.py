"""Pictures that come with a request."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.common.errors import InvalidInput
from services.common.media import open_image
from services.diffusion.config import PipelineSettings

if TYPE_CHECKING:
    from PIL.Image import Image


Files = Sequence[tuple[str, bytes]]
"""(field, content) of the pictures, in their order, and of the mask, whose field is MASK_FIELD."""

MASK_FIELD = "mask"


def decode_files(files: Files, limits: PipelineSettings) -> "tuple[list[Image], Image | None]":
    """(pictures, mask).

    Raises:
        InvalidInput: names the field.
    """
    _check_sizes(files, limits)
    pictures = [decode_picture(data, field) for field, data in files if field != MASK_FIELD]
    masks = [decode_mask(data, field, pictures[0]) for field, data in files if field == MASK_FIELD]
    return pictures, masks[0] if masks else None


def decode_picture(data: bytes, field: str) -> "Image":
    """The picture upright in RGB; transparent parts on white; of an animation the first frame.

    Raises:
        InvalidInput: names `field`, when the file is no picture.
    """
    from PIL import Image

    picture = _open(data, field)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        ground = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(ground, picture)
    return picture.convert("RGB")


def decode_mask(data: bytes, field: str, of: "Image") -> "Image":
    """The mask of `of` in grey: white where the file is transparent, or without alpha channel where it is white.

    Raises:
        InvalidInput: names `field`, when the file is no picture or of another size.
    """
    from PIL import ImageOps

    mask = _open(data, field)
    if mask.size != of.size:
        sizes = f"{mask.size[0]} x {mask.size[1]}, the picture {of.size[0]} x {of.size[1]}"
        raise InvalidInput(field, f"is {sizes}; they must be the same")
    if mask.has_transparency_data:
        return ImageOps.invert(mask.convert("RGBA").getchannel("A"))
    return mask.convert("L")


def _open(data: bytes, field: str) -> "Image":
    from PIL import ImageOps

    with open_image(data, field) as image:
        image.load()
        return _eight_bit(ImageOps.exif_transpose(image))


def _eight_bit(picture: "Image") -> "Image":
    """Grey of 16 bit, which Pillow would clip to 255, as 8 bit."""
    if not picture.mode.startswith("I"):
        return picture
    import numpy as np
    from PIL import Image

    return Image.fromarray((np.asarray(picture).clip(0, 65535) >> 8).astype(np.uint8))


def _check_sizes(files: Files, limits: PipelineSettings) -> None:
    """Refuses pictures that are, by what their headers say, too large together, too small or too narrow."""
    pixels, most = 0, limits.max_request_image_pixels
    least, ratio = limits.min_image_side, limits.max_aspect_ratio
    for field, data in files:
        with open_image(data, field) as image:
            width, height = image.size
        pixels += width * height
        if pixels > most:
            raise InvalidInput(field, f"is {width} x {height}; a request's pictures may have {most} pixels together")
        if min(width, height) < least:
            raise InvalidInput(field, f"is {width} x {height}; each side must have at least {least} pixels")
        if max(width, height) > ratio * min(width, height):
            raise InvalidInput(field, f"is {width} x {height}; a side may be at most {ratio:g} times the other")
