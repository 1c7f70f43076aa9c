"""The messages of a request: its start, names in it, then the bytes of its files in pieces, opened as images."""

import asyncio
import io
import struct
from collections.abc import AsyncIterator, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from services.common.rpc.errors import InvalidInput
from services.common.rpc.status import abort

if TYPE_CHECKING:
    from PIL.Image import Image

MEDIA_TIMEOUT_S = 30.0  # a client that is silent for longer gives up its place


async def read_bytes(
    field: str, size_bytes: int, requests: AsyncIterator[Any], timeout_s: float = MEDIA_TIMEOUT_S
) -> bytes:
    """The next `size_bytes` of the `MediaChunk`s in `requests`.

    Raises:
        InvalidInput: names `field`, when the chunks do not fit, or the next one does not come within `timeout_s`.
    """
    data = bytearray()
    while len(data) < size_bytes:
        try:
            request = await asyncio.wait_for(anext(requests, None), timeout_s)
        except TimeoutError:
            raise InvalidInput(field, f"no more of its bytes came for {timeout_s:g} s") from None
        if request is None or request.WhichOneof("message") != "media":
            raise InvalidInput(field, f"has {len(data)} of {size_bytes} bytes; media chunks must bring the rest")
        data += request.media.data
    if len(data) > size_bytes:
        raise InvalidInput(field, f"a media chunk runs past its {size_bytes} bytes")
    return bytes(data)


@contextmanager
def open_image(data: bytes, field: str) -> "Generator[Image]":
    """The image in `data`; only its header has been read.

    Raises:
        InvalidInput: names `field`, when `data` is no image, or what is done with the image inside finds it broken.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            yield image
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidInput(field, f"cannot be decoded as an image: {error}") from None


def claimed_wav_s(data: bytes) -> float:
    """Seconds that a WAV file's header claims; 0 where it claims nothing, and for other files.

    FFmpeg looks at the size of the file instead, and would take a long recording that was cut off for a short one. A
    data size near 2^32 is what programs write that cannot seek back: no claim.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return 0.0
    at, bytes_per_second = 12, 0
    while at + 8 <= len(data):
        name, size_bytes = struct.unpack_from("<4sI", data, at)
        if name == b"fmt " and at + 20 <= len(data):
            (bytes_per_second,) = struct.unpack_from("<I", data, at + 16)
        elif name == b"data":
            return size_bytes / bytes_per_second if bytes_per_second and size_bytes < 0xFFFFFF00 else 0.0
        at += 8 + size_bytes + size_bytes % 2
    return 0.0


async def first_start(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """The `start` that the first of `requests` must be. Another first message, or none, ends the call."""
    first = await anext(requests, None)
    if first is None or first.WhichOneof("message") != "start":
        await abort(context, InvalidInput("message", "the first message must be start"))
    assert first is not None
    return first.start


def spelled(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is `name` in upper or lower case; None: there is none."""
    return next((each for each in known if each.lower() == name.lower()), None)
