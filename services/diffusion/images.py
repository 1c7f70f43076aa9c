"""Pictures that come with a request."""

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from quartet.v1 import dit_pb2, media_pb2
from services.common.errors import InvalidInput, require
from services.common.image_limits import MIN_IMAGE_SIDE
from services.common.media import open_image
from services.common.rpc.requests import read_bytes
from services.diffusion.config import PipelineSettings

if TYPE_CHECKING:
    from PIL.Image import Image


Files = Sequence[tuple[str, bytes]]
"""(field, content) of the pictures, in their order, and of the mask, whose field is _MASK_FIELD."""

_MASK_FIELD = "mask"
_MAX_ASPECT_RATIO = 32  # longer to shorter side


async def read_files(start: dit_pb2.DitStart, requests: AsyncIterator[Any], limits: PipelineSettings) -> Files:
    """The files of `start`; missing bytes come from the messages in `requests`.

    Raises:
        InvalidInput: names a field that is too large or of another kind, or whose bytes do not come.
    """
    media = [(each.field or f"images[{i}]", each) for i, each in enumerate(start.images)]
    if start.HasField("mask"):
        media.append((_MASK_FIELD, start.mask))
    size_bytes = 0
    for field, each in media:
        require(each.kind == media_pb2.MEDIA_KIND_IMAGE, field, "must be of MEDIA_KIND_IMAGE")
        require(each.data or each.size_bytes, field, "is empty")
        size_bytes += len(each.data) or each.size_bytes
        if size_bytes > limits.max_media_bytes:
            raise InvalidInput(
                field, f"makes the pictures larger than the {limits.max_media_bytes} bytes that are taken"
            )
    return [(field, each.data or await read_bytes(field, each.size_bytes, requests)) for field, each in media]


def decode_files(files: Files, limits: PipelineSettings) -> "tuple[list[Image], Image | None]":
    """(pictures, mask). Raises InvalidInput, which names the field."""
    _check_sizes(files, limits.max_request_image_pixels)
    pictures = [decode_picture(data, field) for field, data in files if field != _MASK_FIELD]
    masks = [decode_mask(data, field, pictures[0]) for field, data in files if field == _MASK_FIELD]
    return pictures, masks[0] if masks else None


def decode_picture(data: bytes, field: str) -> "Image":
    """The picture upright in RGB, on white; of an animation the first frame. Raises InvalidInput with `field`."""
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
        InvalidInput: with `field`: no picture, or another size.
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


def _check_sizes(files: Files, max_pixels: int) -> None:
    """Checks sizes by the files' headers."""
    pixels = 0
    for field, data in files:
        with open_image(data, field) as image:
            width, height = image.size
        pixels += width * height
        if pixels > max_pixels:
            reason = f"a request's pictures may have {max_pixels} pixels together"
        elif min(width, height) < MIN_IMAGE_SIDE:
            reason = f"each side must have at least {MIN_IMAGE_SIDE} pixels"
        elif max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
            reason = f"a side may be at most {_MAX_ASPECT_RATIO} times the other"
        else:
            continue
        raise InvalidInput(field, f"is {width} x {height}; {reason}")
