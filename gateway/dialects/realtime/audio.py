"""Sound of clients and of models."""

import numpy as np
import soxr

from gateway.dialects.realtime import g711
from gateway.dialects.realtime.settings.session_config import PCM_RATE_HZ
from gateway.media.encode import BYTES_PER_SAMPLE, Tempo

MODEL_RATE_HZ = 16_000  # of models and speech detector
LAWS: dict[str, g711.Law] = {"audio/pcmu": "mu", "audio/pcma": "a"}
# This filter delays sound by 12 ms, soxr's usual one by 43 ms. Its aliasing is far below G.711's own noise.
_G711_QUALITY = "LQ"


def rate_hz_of(audio_format: str) -> int:
    return g711.RATE_HZ if audio_format in LAWS else PCM_RATE_HZ


class InputAudioStream:
    """Resamples a client's sound to 16 kHz. Times are milliseconds since the session began; `begin_ms` is the first
    sample's. The filter holds the last 12 to 30 ms back until more sound comes, or `flush`."""

    def __init__(self, audio_format: str, begin_ms: float = 0.0) -> None:
        self._law: g711.Law | None = LAWS.get(audio_format)
        self._rate_hz, self._begin_ms = rate_hz_of(audio_format), begin_ms
        self._resampler = soxr.ResampleStream(self._rate_hz, MODEL_RATE_HZ, 1, "int16")
        self._rest, self._received, self._given = b"", 0, 0

    @property
    def received_ms(self) -> float:
        """End of the sound received."""
        return self._begin_ms + 1000 * self._received / self._rate_hz

    @property
    def given_ms(self) -> float:
        """End of the samples returned."""
        return self._begin_ms + 1000 * self._given / MODEL_RATE_HZ

    def add(self, data: bytes) -> np.ndarray:
        """Returns the samples that are ready, (n,) int16. Half a sample waits for its other half."""
        if self._law is None:
            data = self._rest + data
            whole = len(data) // BYTES_PER_SAMPLE * BYTES_PER_SAMPLE
            data, self._rest = data[:whole], data[whole:]
            samples = np.frombuffer(data, "<i2")
        else:
            samples = g711.decode(data, self._law)
        self._received += len(samples)
        return self._counted(self._resampler.resample_chunk(samples))

    def flush(self) -> np.ndarray:
        """Returns the samples that the filter holds back, (n,) int16. More sound may follow."""
        ready = self._resampler.resample_chunk(np.empty(0, np.int16), last=True)
        self._resampler.clear()
        # The filter rounds up: without a limit each flush would move all later times by a part of a sample.
        return self._counted(ready[: self._received * MODEL_RATE_HZ // self._rate_hz - self._given])

    def _counted(self, samples: np.ndarray) -> np.ndarray:
        self._given += len(samples)
        return samples


class OutputAudioStream:
    """Converts mono PCM16 of `rate_hz` to the session's format. `speed`: 0.25 to 4; the pitch stays."""

    def __init__(self, audio_format: str, rate_hz: int, speed: float = 1.0) -> None:
        self._law: g711.Law | None = LAWS.get(audio_format)
        to_hz = rate_hz_of(audio_format)
        self._tempo = None if speed == 1.0 else Tempo(rate_hz, speed)
        quality = "HQ" if self._law is None else _G711_QUALITY
        self._resampler = None if rate_hz == to_hz else soxr.ResampleStream(rate_hz, to_hz, 1, "int16", quality)

    def add(self, pcm16: bytes) -> bytes:
        """Returns the bytes that are ready. Raises ValueError: `pcm16` ends within a sample."""
        return self._encoded(pcm16 if self._tempo is None else self._tempo.add(pcm16), last=False)

    def close(self) -> bytes:
        return self._encoded(b"" if self._tempo is None else self._tempo.close(), last=True)

    def _encoded(self, pcm16: bytes, last: bool) -> bytes:
        samples = np.frombuffer(pcm16, "<i2")
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=last)
        return samples.tobytes() if self._law is None else g711.encode(samples, self._law)
