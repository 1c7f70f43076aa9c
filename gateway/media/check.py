"""Loads a request's media and checks their headers before any stage sees them."""

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import av
from av.container import InputContainer

from gateway.errors import from_error, invalid
from gateway.media.fetch import Fetcher, media_errors, too_large
from gateway.media.names import MAX_OF_REQUEST
from gateway.settings import GatewaySettings
from gateway.tasks import cancel, limited
from services.common.errors import DeadlineExceeded
from services.common.media import MediaError
from services.common.media.containers import claimed_s, opened, sound_track, video_track
from services.common.media.images import check_image, open_image

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
    slots, turn = asyncio.Semaphore(_PARALLEL_LOADS), asyncio.Semaphore(MAX_OF_REQUEST)
    total_bytes = 0

    async def load(file: MediaFile) -> None:
        nonlocal total_bytes
        with media_errors(file.field):
            async with slots:
                if file.url:
                    file.content = await fetcher.get(file.url, file.kind, turn)
                if len(file.content) > limits.media_max_bytes:
                    raise too_large(limits.media_max_bytes)
                total_bytes += len(file.content)
                if total_bytes > limits.max_body_bytes:
                    raise MediaError(f"all media together are more than {limits.max_body_bytes} bytes")
                await asyncio.to_thread(check, file.kind, file.content, limits)

    late = DeadlineExceeded(f"the request's media took longer than its {limits.request_timeout_s:g} s")
    async with limited(limits.request_timeout_s, from_error("gateway", late)):
        await _in_order(*map(load, files))


async def _in_order(*works: Coroutine[Any, Any, None]) -> None:
    """Does `works` at once. Raises the error of the first that fails, and does not wait for those behind it: 64 names
    that nobody answers take minutes."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        for task in tasks:
            await task
    finally:
        await cancel(*tasks)


def check(kind: str, content: bytes, limits: GatewaySettings) -> None:
    """Checks a file's header. Blocking. Raises MediaError: empty, broken, of another kind, too large, too long."""
    if not content:
        raise MediaError("the file is empty")
    if kind == "image":
        check_image(content, limits.media_max_image_pixels)
    elif kind == "audio":
        with opened(content, "audio") as container:
            _check_track("audio", container, sound_track(container), content, limits.media_max_audio_s)
    else:
        with opened(content, "video") as container:
            track = video_track(container)
            if track.width * track.height > (most := limits.media_max_image_pixels):
                size = f"{track.width} x {track.height}"
                raise MediaError(f"{size} pixels are more than the {most} allowed")
            _check_track("video", container, track, content, limits.media_max_video_s)


def image_pixels(content: bytes) -> int:
    """Width x height of a checked image. Blocking."""
    with open_image(content, sys.maxsize) as image:
        return image.width * image.height


def _check_track(
    kind: str, container: InputContainer, track: av.AudioStream | av.VideoStream, content: bytes, max_s: float
) -> None:
    duration_s = claimed_s(container, track, content)
    if duration_s > max_s:
        raise MediaError(f"the {kind} is {duration_s:.0f} s long; at most {max_s:g} s are allowed")
    if not any(packet.size for packet in container.demux(track)):
        raise MediaError(f"the {kind} has no content: its length is zero")
