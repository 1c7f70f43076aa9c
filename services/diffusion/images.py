"""Pictures that come with a request."""

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from quartet.v1 import dit_pb2, media_pb2
from services.common.errors import InvalidInput, require
from services.common.media import MediaError, media_errors
from services.common.media.images import decode_channels, decode_image, open_image
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
    """(pictures, mask), as `services.common.media.images` decodes them. Raises InvalidMedia, which names the field."""
    most = limits.max_request_image_pixels
    _check_sizes(files, most)
    pictures: list[Image] = []
    mask = None
    for field, data in files:
        with media_errors(field):
            if field == _MASK_FIELD:
                mask = decode_mask(data, pictures[0], most)
            else:
                pictures.append(decode_image(data, most))
    return pictures, mask


def decode_mask(data: bytes, of: "Image", max_pixels: int) -> "Image":
    """The mask of `of` in grey: white where the file is transparent, or without alpha channel where it is white.

    Raises:
        MediaError: no picture, or another size.
    """
    from PIL import ImageOps

    mask = decode_channels(data, max_pixels)
    if mask.size != of.size:
        sizes = f"{mask.size[0]} x {mask.size[1]}, the picture {of.size[0]} x {of.size[1]}"
        raise MediaError(f"is {sizes}; they must be the same")
    if mask.has_transparency_data:
        return ImageOps.invert(mask.convert("RGBA").getchannel("A"))
    return mask.convert("L")


def _check_sizes(files: Files, max_pixels: int) -> None:
    """Checks sizes by the files' headers. Raises InvalidMedia."""
    pixels = 0
    for field, data in files:
        with media_errors(field):
            with open_image(data, max_pixels) as image:
                width, height = image.size
            pixels += width * height
            if pixels > max_pixels:
                raise MediaError(f"is {width} x {height}; a request's pictures may have {max_pixels} pixels together")
            if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
                raise MediaError(f"is {width} x {height}; a side may be at most {_MAX_ASPECT_RATIO} times the other")
