"""Loads a request's media and checks their headers before any stage sees them."""

import asyncio
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import av
import av.error
from av.container import InputContainer
from PIL import Image

from gateway.errors import from_error, invalid
from gateway.media.fetch import Fetcher, MediaError, media_errors, too_large
from gateway.settings import GatewaySettings
from gateway.tasks import limited
from services.common.errors import DeadlineExceeded
from services.common.image_limits import MIN_IMAGE_SIDE
from services.common.media import claimed_wav_s

# Containers of one file each. Playlists (HLS, DASH, concat) are not among them: reading one opens what it names.
_CONTAINERS = (
    "wav,w64,aiff,au,caf,mp3,flac,ogg,aac,ac3,amr,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,mpegts,mpeg,asf,gif"
)
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_PARALLEL_LOADS = 8


@dataclass
class MediaFile:
    """A media file of a request.

    Attributes:
        field: its place in the request.
        kind: "image", "audio" or "video".
        url: "" if the file came with the request.
        content: empty until a URL is loaded.
    """

    field: str
    kind: str
    url: str = ""
    content: bytes = b""


async def load_media(fetcher: Fetcher, files: Sequence[MediaFile]) -> None:
    """Fetches and checks the files. Raises ApiError: 400 naming the first one at fault; 504, too slow."""
    limits = fetcher.limits
    linked = [file for file in files if file.url]  # the form's reader has counted its files
    if len(linked) > (most := limits.media_max_parts):
        raise invalid(linked[most].field, f"the request has {len(linked)} media parts; at most {most} are allowed")
    slots = asyncio.Semaphore(_PARALLEL_LOADS)
    total_bytes = 0

    async def load(file: MediaFile) -> None:
        nonlocal total_bytes
        with media_errors(file.field):
            async with slots:
                if file.url:
                    file.content = await fetcher.get(file.url, file.kind)
                if len(file.content) > limits.media_max_bytes:
                    raise too_large(limits.media_max_bytes)
                total_bytes += len(file.content)
                if total_bytes > limits.max_body_bytes:
                    raise MediaError(f"all media together are more than {limits.max_body_bytes} bytes")
                await asyncio.to_thread(check, file.kind, file.content, limits)

    late = DeadlineExceeded(f"the request's media took longer than its {limits.request_timeout_s:g} s")
    async with limited(limits.request_timeout_s, from_error("gateway", late)):
        outcomes = await asyncio.gather(*map(load, files), return_exceptions=True)
    for error in filter(None, outcomes):
        raise error


def check(kind: str, content: bytes, limits: GatewaySettings) -> None:
    """Checks a file's header. Blocking. Raises MediaError: empty, broken, of another kind, too large, too long."""
    if not content:
        raise MediaError("the file is empty")
    if kind == "image":
        _check_image(content, limits)
    else:
        _check_stream(kind, content, limits)


def _check_image(content: bytes, limits: GatewaySettings) -> None:
    try:
        with _opened(content) as image:
            _check_pixels(image.width, image.height, limits)
            if min(image.size) < MIN_IMAGE_SIDE:
                size = f"{image.width} x {image.height} pixels"
                raise MediaError(f"the image is {size}; each side must be at least {MIN_IMAGE_SIDE}")
            image.verify()
    except MediaError:
        raise
    except Exception:  # Pillow's readers raise whatever their parsing runs into
        formats = ", ".join(_IMAGE_FORMATS)
        raise MediaError(f"the file is corrupt, or is no image of these formats: {formats}") from None


def image_pixels(content: bytes) -> int:
    """Width x height of a checked image. Blocking."""
    with _opened(content) as image:
        return image.width * image.height


@contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is ours
        with Image.open(io.BytesIO(content), formats=_IMAGE_FORMATS) as image:
            yield image


def _check_pixels(width: int, height: int, limits: GatewaySettings) -> None:
    if width * height > (most := limits.media_max_image_pixels):
        raise MediaError(f"{width} x {height} pixels are more than the {most} allowed")


@contextmanager
def opened_track(kind: str, content: bytes) -> Iterator[tuple[InputContainer, av.AudioStream | av.VideoStream]]:
    """A file of "audio" or "video", and its first track of that kind.

    Raises:
        MediaError: the file has none, or is broken, which may show only while it is read.
    """
    try:
        with av.open(io.BytesIO(content), mode="r", options={"format_whitelist": _CONTAINERS}) as container:
            streams = container.streams.audio if kind == "audio" else container.streams.video
            if not streams:
                raise MediaError(f"the file has no {kind} track")
            yield container, streams[0]
    except (av.error.FFmpegError, ValueError, OverflowError, AttributeError):  # PyAV: unknown codecs have no `rate`
        raise MediaError(f"the file is corrupt, or is no {kind} that FFmpeg reads") from None


def _check_stream(kind: str, content: bytes, limits: GatewaySettings) -> None:
    max_s = limits.media_max_audio_s if kind == "audio" else limits.media_max_video_s
    with opened_track(kind, content) as (container, stream):
        if kind == "video":
            context = container.streams.video[0].codec_context
            _check_pixels(context.width, context.height, limits)
        duration_s = max(_duration_s(container, stream), claimed_wav_s(content))
        if duration_s > max_s:
            raise MediaError(f"the {kind} is {duration_s:.0f} s long; at most {max_s:g} s are allowed")
        if not any(packet.size for packet in container.demux(stream)):
            raise MediaError(f"the {kind} has no content: its length is zero")


def _duration_s(container: InputContainer, stream: av.AudioStream | av.VideoStream) -> float:
    """Longest duration that the headers claim; 0 if they claim none."""
    of_file = (container.duration or 0) / av.time_base
    of_track = float((stream.duration or 0) * (stream.time_base or 0))
    return max(of_file, of_track, 0.0)
