"""Loads a request's media and checks their headers before any stage sees them."""

import asyncio
import sys
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from gateway.errors import from_error, invalid
from gateway.media.fetch import Fetcher, is_data_url, media_errors, too_large
from gateway.media.kept import MediaName
from gateway.media.names import MAX_OF_REQUEST
from gateway.settings import GatewaySettings
from gateway.tasks import cancel, held, limited
from services.common.errors import DeadlineExceeded
from services.common.media import MediaError
from services.common.media.calls import Read
from services.common.media.calls import read as read_here

_PARALLEL_LOADS = 8
_PARALLEL_CHECKS = 2  # of a request: more would take the processes and threads that others need
_MOST_COPIED = 4 * 1024 * 1024  # of a file that was kept: into the message to a stage


@dataclass
class MediaFile:
    """A media file of a request.

    Attributes:
        field: its place in the request.
        kind: "image", "audio" or "video".
        url: "" if the file came with the request.
        content: empty until it is loaded.
        name: the client's; without url and content, the file that came under it before is meant.
    """

    field: str
    kind: str
    url: str = ""
    content: bytes = b""
    name: MediaName | None = None

    @property
    def is_only_named(self) -> bool:
        return self.name is not None and not self.url


async def load_media(fetcher: Fetcher, files: Sequence[MediaFile]) -> None:
    """Fetches and checks the files. Raises ApiError: 400 naming the first one at fault; 504, too slow."""
    limits = fetcher.limits
    linked = [file for file in files if file.url or file.name]  # the form's reader has counted its files
    if len(linked) > (most := limits.media_max_parts):
        raise invalid(linked[most].field, f"the request has {len(linked)} media parts; at most {most} are allowed")
    slots, turn = asyncio.Semaphore(_PARALLEL_LOADS), asyncio.Semaphore(MAX_OF_REQUEST)
    checks = asyncio.Semaphore(_PARALLEL_CHECKS)
    total_bytes = 0

    def count(file: MediaFile) -> None:
        nonlocal total_bytes
        total_bytes += len(file.content)
        if total_bytes > limits.max_body_bytes:
            raise MediaError(f"all media together are more than {limits.max_body_bytes} bytes")

    async def load(file: MediaFile) -> None:
        with media_errors(file.field):
            async with slots:
                if file.url:
                    async with checks if is_data_url(file.url) else nullcontext():
                        file.content = await fetcher.get(file.url, file.kind, turn)
                if len(file.content) > limits.media_max_bytes:
                    raise too_large(limits.media_max_bytes)
                count(file)
                async with checks:
                    await fetcher.decoding.run(check, file.kind, file.content, limits)
        if file.name is not None:
            fetcher.kept.put(file.name, file.kind, file.content)

    if not files:
        return
    late = DeadlineExceeded(f"the request's media took longer than its {limits.request_timeout_s:g} s")
    async with limited(limits.request_timeout_s, from_error("gateway", late)):
        await _in_order(*(load(file) for file in files if not file.is_only_named))
    numbers = Counter[str]()
    for file in files:
        if file.is_only_named:
            with media_errors(file.field):
                file.content = _kept(fetcher, file, numbers[file.kind])
                count(file)
        numbers[file.kind] += 1


def _kept(fetcher: Fetcher, file: MediaFile, number: int) -> bytes:
    """The file, which was checked when it came. Raises ApiError: 400, it is not kept, or not any more; 503, no room."""
    content = fetcher.kept.get(file.name, file.kind) if file.name else None
    if content is None:
        # vLLM's words, by which its clients know that they have to send the file
        words = f"Cache miss for {file.kind} at index {number} but data is not provided"
        raise invalid(file.field, f"{words}: send the {file.kind} again, with its uuid", "unknown_media")
    held.get()(min(len(content), _MOST_COPIED))
    return content


async def _in_order(*works: Coroutine[Any, Any, None]) -> None:
    """Does `works` at once. Raises the error of the first that fails, and does not wait for those behind it: 64 names
    that nobody answers take minutes."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        for task in tasks:
            await task
    finally:
        await cancel(*tasks)


def check(kind: str, content: bytes, limits: GatewaySettings, read: Read = read_here) -> None:
    """Checks a file's header. Blocking. Raises MediaError: empty, broken, of another kind, too large, too long."""
    if not content:
        raise MediaError("the file is empty")
    max_s = limits.media_max_audio_s if kind == "audio" else limits.media_max_video_s
    for _ in read("check", content, kind, limits.media_max_image_pixels, max_s):
        pass


def image_pixels(content: bytes, read: Read) -> int:
    """Width x height of a checked image. Blocking."""
    ((width, height),) = read("image_size", content, sys.maxsize)
    return width * height
