"""Sound that a client sends, in blocks."""

import io
import wave
from typing import Any

from cli.wyoming.gateway_client import RequestError

MAX_S = 300
MAX_BYTES = 64 * 1024 * 1024
_BOUNDS = {"rate": (1_000, 384_000), "width": (1, 4), "channels": (1, 8)}


class Recording:
    """PCM of one format: `rate` samples a second, `width` bytes a sample, interleaved `channels`.

    Raises RequestError: a value is none of a sound.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.format = _format(data)
        self._pcm = bytearray()

    @property
    def seconds(self) -> float:
        rate, width, channels = self.format
        return len(self._pcm) / (rate * width * channels)

    def add(self, data: dict[str, Any], block: bytes) -> None:
        """Raises RequestError: the format is another, or the sound is too long."""
        if _format(data) != self.format:
            raise RequestError("audio-chunk: its rate, width and channels must be those of audio-start", "invalid")
        self._pcm += block
        if self.seconds > MAX_S or len(self._pcm) > MAX_BYTES:
            most = f"more than {MAX_S} s, or {MAX_BYTES >> 20} MiB"
            raise RequestError(
                f"audio-chunk: the sound is {most}; send it in parts, each to its audio-stop", "too_large"
            )

    def wav(self) -> bytes:
        rate, width, channels = self.format
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setframerate(rate)
            out.setsampwidth(width)
            out.setnchannels(channels)
            whole = len(self._pcm) // (width * channels) * (width * channels)
            out.writeframes(memoryview(self._pcm)[:whole])
        return file.getvalue()


def _format(data: dict[str, Any]) -> tuple[int, int, int]:
    values = []
    for name, (least, most) in _BOUNDS.items():
        value = data.get(name)
        if not isinstance(value, int) or not least <= value <= most:
            raise RequestError(f"{name}: must be a whole number of {least} to {most}", "invalid")
        values.append(value)
    return values[0], values[1], values[2]
