"""Pictures and videos that come with a request."""

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from quartet.v1 import dit_pb2, media_pb2, server_info_pb2
from services.common.errors import InvalidInput, require
from services.common.media import MediaError, media_errors
from services.common.media.calls import Read
from services.common.media.calls import read as read_here
from services.common.media.decoders import Decoders
from services.common.rpc.requests import read_bytes
from services.diffusion.config import PipelineSettings
from services.diffusion.pictures import Pictures
from services.diffusion.videos import read_frames

if TYPE_CHECKING:
    from PIL.Image import Image


Role = Literal["image", "mask", "control", "video", "control_video"]


class File(NamedTuple):
    """A file, what it is for, and the field that errors name."""

    role: Role
    field: str
    data: bytes


_MAX_ASPECT_RATIO = 32  # longer to shorter side
_VIDEOS: tuple[Literal["video", "control_video"], ...] = ("video", "control_video")


async def read_files(start: dit_pb2.DitStart, requests: AsyncIterator[Any], limits: PipelineSettings) -> list[File]:
    """The files of `start` in the order of its fields; missing bytes come from the messages in `requests`.

    Raises:
        InvalidInput: names a field that is too large or of another kind, or whose bytes do not come.
    """
    media: list[tuple[Role, str, media_pb2.Media]] = []
    media.extend(("image", each.field or f"images[{i}]", each) for i, each in enumerate(start.images))
    if start.HasField("mask"):
        media.append(("mask", "mask", start.mask))
    controls = enumerate(start.control_images)
    media.extend(("control", each.field or f"control_images[{i}]", each) for i, each in controls)
    for role in _VIDEOS:
        if start.HasField(role):
            media.append((role, getattr(start, role).field or role, getattr(start, role)))
    size_bytes = 0
    for role, field, each in media:
        kind = media_pb2.MEDIA_KIND_VIDEO if role in _VIDEOS else media_pb2.MEDIA_KIND_IMAGE
        require(each.kind == kind, field, f"must be of {media_pb2.MediaKind.Name(kind)}")
        require(each.data or each.size_bytes, field, "is empty")
        size_bytes += len(each.data) or each.size_bytes
        if size_bytes > limits.max_media_bytes:
            raise InvalidInput(
                field, f"makes the request's files larger than the {limits.max_media_bytes} bytes that are taken"
            )
    return [
        File(role, field, each.data or await read_bytes(field, each.size_bytes, requests))
        for role, field, each in media
    ]


async def decode_apart(
    files: Sequence[File],
    start: dit_pb2.DitStart,
    info: server_info_pb2.DitInfo,
    limits: PipelineSettings,
    decoders: Decoders,
) -> Pictures:
    """`decode_files` in a process, which ends when this is cancelled."""
    return await decoders.run(None, decode_files, files, start, info, limits) if files else Pictures()


def decode_files(
    files: Sequence[File],
    start: dit_pb2.DitStart,
    info: server_info_pb2.DitInfo,
    limits: PipelineSettings,
    read: Read = read_here,
) -> Pictures:
    """As `services.common.media` decodes them. Raises InvalidMedia, which names the field."""
    from PIL import Image

    most = limits.max_request_image_pixels
    _check_sizes([file for file in files if file.role not in _VIDEOS], most, read)
    images: list[Image.Image] = []
    controls: list[Image.Image] = []
    mask, videos = None, dict[Role, list[Image.Image]]()
    for role, field, data in files:
        with media_errors(field):
            if role == "mask":
                mask = decode_mask(data, images[0], most, read)
            elif role in _VIDEOS:
                videos[role] = read_frames(data, start, info, limits.max_request_video_pixels, read)
                if (count := len(videos[role])) != (first := len(next(iter(videos.values())))):
                    raise MediaError(f"has {count} frames, the video {first}: they must be of one length")
            else:
                (pixels,) = read("image", data, most)
                (images if role == "image" else controls).append(Image.fromarray(pixels))
    return Pictures(images, mask, controls, *(videos.get(role, ()) for role in _VIDEOS))


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
