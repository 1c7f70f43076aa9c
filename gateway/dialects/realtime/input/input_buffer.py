"""Sound that the client has not committed."""

import numpy as np

from gateway.dialects.realtime.audio import MODEL_RATE_HZ, InputAudioStream
from gateway.dialects.realtime.events import RealtimeError, wrong
from gateway.media.encode import BYTES_PER_SAMPLE

_LEAST_MS = 100
_SAMPLES_PER_MS = MODEL_RATE_HZ // 1000
_BYTES_PER_MS = BYTES_PER_SAMPLE * _SAMPLES_PER_MS
_MOST_S = 900


class InputBuffer:
    """Mono PCM16 at 16 kHz, of a client that sends `audio_format`."""

    def __init__(self, audio_format: str) -> None:
        self._reader, self._samples = InputAudioStream(audio_format), bytearray()
        self._begin_ms, self._new = 0.0, np.empty(0, np.int16)  # samples that `add` has not returned

    @property
    def duration_ms(self) -> float:
        return self._reader.received_ms - self._begin_ms

    def change_format(self, audio_format: str) -> None:
        self._take(self._reader.flush())
        self._reader = InputAudioStream(audio_format, self._reader.given_ms)

    def add(self, data: bytes) -> np.ndarray:
        """Returns the samples since the last call, (n,) int16 at 16 kHz. Raises RealtimeError: it is full."""
        if self.duration_ms >= _MOST_S * 1000:
            reason = f"the buffer has {_MOST_S} s of sound, its most; commit or clear it"
            raise wrong("audio", reason, "input_audio_buffer_full")
        self._take(self._reader.add(data))
        new, self._new = self._new, np.empty(0, np.int16)
        return new

    def all(self) -> bytes:
        """Returns all sound. Raises RealtimeError: there is too little."""
        if self.duration_ms < _LEAST_MS:
            reason = f"at least {_LEAST_MS} ms of sound make an item, it has {self.duration_ms:.2f} ms"
            raise RealtimeError("input_audio_buffer_commit_empty", f"the buffer is too small: {reason}")
        self._take(self._reader.flush())
        return bytes(self._samples)

    @property
    def returned_ms(self) -> float:
        """End of the samples that `add` has returned."""
        return self._reader.given_ms - len(self._new) / _SAMPLES_PER_MS

    def between(self, begin_ms: float, end_ms: float) -> bytes:
        return bytes(self._samples[self._offset(begin_ms) : self._offset(end_ms)])

    def drop_before(self, ms: float) -> None:
        del self._samples[: self._offset(ms)]
        self._begin_ms = max(self._begin_ms, ms)

    def _offset(self, ms: float) -> int:
        first_ms = self._reader.given_ms - len(self._samples) / _BYTES_PER_MS
        return BYTES_PER_SAMPLE * round(max(0.0, ms - first_ms) * _SAMPLES_PER_MS)

    def clear(self) -> None:
        self._take(self._reader.flush())
        self._samples, self._begin_ms = bytearray(), self._reader.received_ms

    def _take(self, samples: np.ndarray) -> None:
        self._samples += samples.astype("<i2", copy=False).tobytes()
        self._new = np.concatenate([self._new, samples])
