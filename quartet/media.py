"""Images, audio and videos in prompts."""

import io
import mimetypes
import uuid
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import soundfile
from PIL import Image

from gateway.media.fetch import Fetcher
from gateway.settings import GatewaySettings
from quartet.answers import Audio
from quartet.errors import refused

Kind = Literal["image", "audio", "video"]
KINDS: tuple[Kind, ...] = ("image", "audio", "video")
_REMOTE = ("https://", "http://", "data:")
_SCHEME = "quartet:"  # of files that came with a prompt; no URL that is fetched has it
_PNG_MODES = ("1", "L", "LA", "I", "P", "RGB", "RGBA")


@dataclass(frozen=True, eq=False)
class Media:
    """A media part of a message; see `image`, `audio` and `video`. `rate_hz` is of an array."""

    kind: Kind
    source: Any
    rate_hz: int | None = None

    @property
    def url(self) -> str | None:
        return self.source if isinstance(self.source, str) and self.source.lower().startswith(_REMOTE) else None

    def file(self, field: str) -> bytes:
        """The bytes of the file; `field` is its place, for errors. Blocking: call it in a thread.

        Raises:
            Error: it cannot be read, or is no media.
        """
        source = self.source
        if isinstance(source, bytes | bytearray | memoryview):
            return bytes(source)
        if isinstance(source, str | Path):
            try:
                return Path(source).read_bytes()
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise refused(field, f"{str(source)[:200]!r} cannot be read: {reason}") from None
        if self.kind == "image" and isinstance(source, Image.Image):
            return _png(source)
        if self.kind == "image" and isinstance(source, np.ndarray):
            return _png(_from_array(source, field))
        if self.kind == "audio" and isinstance(source, Audio):
            return source.encoded("wav")
        if self.kind == "audio" and isinstance(source, np.ndarray):
            return _wav(source, self.rate_hz, field)
        also = {
            "image": ", a Pillow image or an array (height, width, 3) of uint8",
            "audio": ", or an array of samples with its rate_hz",
            "video": "",
        }
        raise refused(field, f"{type(source).__name__} is no {self.kind}; give a URL, a path, bytes{also[self.kind]}")


def image(source: Any) -> Media:
    """An image: a URL, a path, a file's bytes, a Pillow image, or (height, width) or (height, width, 3 or 4) uint8."""
    return Media("image", source)


def audio(source: Any, rate_hz: int | None = None) -> Media:
    """Audio: a URL, a path, a file's bytes, an `Audio`, or (n,) or (n, channels) int16 or float, -1 to 1, with
    `rate_hz` samples a second; also as a tuple of both."""
    if isinstance(source, tuple) and len(source) == 2 and rate_hz is None:
        return Media("audio", *source)
    return Media("audio", source, rate_hz)


def video(source: Any) -> Media:
    """A video: a URL, a path, or a file's bytes."""
    return Media("video", source)


def media_of(value: Any, field: str) -> Media:
    """Raises Error: the kind is unclear."""
    if isinstance(value, Media):
        return value
    if isinstance(value, Image.Image):
        return image(value)
    if isinstance(value, Audio):
        return audio(value)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], np.ndarray):
        return audio(value)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3):
        return image(value)
    if isinstance(value, Path):
        guessed = (mimetypes.guess_type(value.name)[0] or "").partition("/")[0]
        for kind in KINDS:
            if kind == guessed:
                return Media(kind, value)
    raise refused(
        field, f"what kind of part this {type(value).__name__} is cannot be told; use quartet.image, audio or video"
    )


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    (image if image.mode in _PNG_MODES else image.convert("RGB")).save(file, "png", compress_level=1)
    return file.getvalue()


def _from_array(pixels: np.ndarray, field: str) -> Image.Image:
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)):
        raise refused(
            field, f"{list(pixels.shape)} of {pixels.dtype} is no image: (height, width, 3) of uint8 is wanted"
        )
    return Image.fromarray(pixels)


def _wav(samples: np.ndarray, rate_hz: int | None, field: str) -> bytes:
    if not isinstance(rate_hz, int | np.integer) or rate_hz < 1:
        raise refused(field, "an array of samples needs its samples a second: quartet.audio(samples, rate_hz=16_000)")
    if samples.ndim not in (1, 2) or not (samples.dtype == np.int16 or np.issubdtype(samples.dtype, np.floating)):
        is_now = f"{list(samples.shape)} of {samples.dtype}"
        raise refused(field, f"{is_now} is no sound: (n,) or (n, channels) of int16 or float is wanted")
    file, subtype = io.BytesIO(), "PCM_16"
    if samples.dtype != np.int16:
        samples, subtype = samples.astype(np.float32), "FLOAT"
        if not np.isfinite(samples).all():
            raise refused(field, "has samples that are no numbers")
    soundfile.write(file, samples, int(rate_hz), format="WAV", subtype=subtype)
    return file.getvalue()


class OwnFiles(Fetcher):
    """Also serves the files of prompts."""

    def __init__(self, limits: GatewaySettings) -> None:
        super().__init__(limits)
        self._files: dict[str, bytes] = {}

    async def get(self, url: str, kind: str, turn: AbstractAsyncContextManager[Any] = nullcontext()) -> bytes:
        if url.startswith(_SCHEME):
            return self._files[url]
        return await super().get(url, kind, turn)

    @contextmanager
    def holding(self, files: Sequence[bytes]):
        """Yields URLs of `files`, valid in the block."""
        urls = [f"{_SCHEME}{uuid.uuid4().hex}" for _ in files]
        self._files.update(zip(urls, files, strict=True))
        try:
            yield urls
        finally:
            for url in urls:
                del self._files[url]
