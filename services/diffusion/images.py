"""Pictures that come with a request."""

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from quartet.v1 import dit_pb2, media_pb2
from services.common.errors import InvalidInput, require
from services.common.media import MediaError, media_errors
from services.common.media.calls import Read
from services.common.media.calls import read as read_here
from services.common.media.decoders import Decoders
from services.common.rpc.requests import read_bytes
from services.diffusion.config import PipelineSettings
from services.diffusion.pictures import Pictures

if TYPE_CHECKING:
    from PIL.Image import Image


Role = Literal["image", "mask", "control"]


class File(NamedTuple):
    """A file, what it is for, and the field that errors name."""

    role: Role
    field: str
    data: bytes


_MAX_ASPECT_RATIO = 32  # longer to shorter side


async def read_files(start: dit_pb2.DitStart, requests: AsyncIterator[Any], limits: PipelineSettings) -> list[File]:
    """The files of `start`, images first, then the mask; missing bytes come from the messages in `requests`.

    Raises:
        InvalidInput: names a field that is too large or of another kind, or whose bytes do not come.
    """
    media: list[tuple[Role, str, media_pb2.Media]] = []
    media.extend(("image", each.field or f"images[{i}]", each) for i, each in enumerate(start.images))
    if start.HasField("mask"):
        media.append(("mask", "mask", start.mask))
    controls = enumerate(start.control_images)
    media.extend(("control", each.field or f"control_images[{i}]", each) for i, each in controls)
    size_bytes = 0
    for _, field, each in media:
        require(each.kind == media_pb2.MEDIA_KIND_IMAGE, field, "must be of MEDIA_KIND_IMAGE")
        require(each.data or each.size_bytes, field, "is empty")
        size_bytes += len(each.data) or each.size_bytes
        if size_bytes > limits.max_media_bytes:
            raise InvalidInput(
                field, f"makes the pictures larger than the {limits.max_media_bytes} bytes that are taken"
            )
    return [
        File(role, field, each.data or await read_bytes(field, each.size_bytes, requests))
        for role, field, each in media
    ]


async def decode_apart(files: Sequence[File], limits: PipelineSettings, decoders: Decoders) -> Pictures:
    """`decode_files` in a process, which ends when this is cancelled."""
    return await decoders.run(None, decode_files, files, limits) if files else Pictures()


def decode_files(files: Sequence[File], limits: PipelineSettings, read: Read = read_here) -> Pictures:
    """As `services.common.media.images` decodes them. Raises InvalidMedia, which names the field."""
    from PIL import Image

    most = limits.max_request_image_pixels
    _check_sizes(files, most, read)
    images: list[Image.Image] = []
    controls: list[Image.Image] = []
    mask = None
    for role, field, data in files:
        with media_errors(field):
            if role == "mask":
                mask = decode_mask(data, images[0], most, read)
            else:
                (pixels,) = read("image", data, most)
                (images if role == "image" else controls).append(Image.fromarray(pixels))
    return Pictures(images, mask, controls)


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


def _check_sizes(files: Sequence[File], max_pixels: int, read: Read) -> None:
    """Checks sizes by the files' headers. Raises InvalidMedia."""
    pixels = 0
    for _, field, data in files:
        with media_errors(field):
            ((width, height),) = read("image_size", data, max_pixels)
            pixels += width * height
            if pixels > max_pixels:
                raise MediaError(f"is {width} x {height}; a request's pictures may have {max_pixels} pixels together")
            if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
                raise MediaError(f"is {width} x {height}; a side may be at most {_MAX_ASPECT_RATIO} times the other")
