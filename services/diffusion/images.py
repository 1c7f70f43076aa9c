"""Pictures that come with a request."""

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from quartet.v1 import dit_pb2, media_pb2
from services.common.errors import InvalidInput, require
from services.common.media import MediaError, media_errors
from services.common.media.calls import Read
from services.common.media.calls import read as read_here
from services.common.media.decoders import Decoders
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


async def decode_apart(
    files: Files, limits: PipelineSettings, decoders: Decoders
) -> "tuple[list[Image], Image | None]":
    """`decode_files` in a process, which ends when this is cancelled."""
    return await decoders.run(None, decode_files, files, limits) if files else ([], None)


def decode_files(files: Files, limits: PipelineSettings, read: Read = read_here) -> "tuple[list[Image], Image | None]":
    """(pictures, mask), as `services.common.media.images` decodes them. Raises InvalidMedia, which names the field."""
    from PIL import Image

    most = limits.max_request_image_pixels
    _check_sizes(files, most, read)
    pictures: list[Image.Image] = []
    mask = None
    for field, data in files:
        with media_errors(field):
            if field == _MASK_FIELD:
                mask = decode_mask(data, pictures[0], most, read)
            else:
                (pixels,) = read("image", data, most)
                pictures.append(Image.fromarray(pixels))
    return pictures, mask


def decode_mask(data: bytes, of: "Image", max_pixels: int, read: Read = read_here) -> "Image":
    """The mask of `of` in grey: see `services.common.media.images`.

    Raises:
        MediaError: no picture, or another size.
    """
    from PIL import Image

    (pixels,) = read("mask", data, max_pixels)
    mask = Image.fromarray(pixels)
    if mask.size != of.size:
        sizes = f"{mask.size[0]} x {mask.size[1]}, the picture {of.size[0]} x {of.size[1]}"
        raise MediaError(f"is {sizes}; they must be the same")
    return mask


def _check_sizes(files: Files, max_pixels: int, read: Read) -> None:
    """Checks sizes by the files' headers. Raises InvalidMedia."""
    pixels = 0
    for field, data in files:
        with media_errors(field):
            ((width, height),) = read("image_size", data, max_pixels)
            pixels += width * height
            if pixels > max_pixels:
                raise MediaError(f"is {width} x {height}; a request's pictures may have {max_pixels} pixels together")
            if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
                raise MediaError(f"is {width} x {height}; a side may be at most {_MAX_ASPECT_RATIO} times the other")
