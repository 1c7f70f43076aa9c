"""Sound that a client has sent and not yet made an item of."""

import numpy as np

from gateway.dialects.realtime.audio import MODEL_RATE_HZ, InputAudio
from gateway.dialects.realtime.events import RealtimeError
from gateway.media.encode import BYTES_PER_SAMPLE

_LEAST_MS = 100
_SAMPLES_PER_MS = MODEL_RATE_HZ // 1000
_BYTES_PER_MS = BYTES_PER_SAMPLE * _SAMPLES_PER_MS
_MOST_S = 900


class InputBuffer:
    """The buffer: mono PCM16 of 16 kHz.

    Args:
        audio_format: of what the client sends: "audio/pcm", "audio/pcmu" or "audio/pcma".
    """

    def __init__(self, audio_format: str) -> None:
        self._reader, self._samples = InputAudio(audio_format), bytearray()
        self._begin_ms, self._flushed = 0.0, np.empty(0, np.int16)

    @property
    def duration_ms(self) -> float:
        """Of the sound in it."""
        return self._reader.received_ms - self._begin_ms

    def change_format(self, audio_format: str) -> None:
        """What follows is of another format."""
        self._flush()
        self._reader = InputAudio(audio_format, self._reader.given_ms)

    def add(self, data: bytes) -> np.ndarray:
        """Takes more, and returns what is new since the last call: (n,) int16, 16 kHz. Raises RealtimeError: it is
        full."""
        if self.duration_ms >= _MOST_S * 1000:
            reason = f"audio: the buffer has {_MOST_S} s of sound, its most; commit or clear it"
            raise RealtimeError("input_audio_buffer_full", reason, "audio")
        samples = self._reader.add(data)
        self._samples += _bytes(samples)
        new, self._flushed = np.concatenate([self._flushed, samples]), np.empty(0, np.int16)
        return new

    def all(self) -> bytes:
        """All of it. Raises RealtimeError: there is too little."""
        if self.duration_ms < _LEAST_MS:
            message = (
                f"the buffer is too small: at least {_LEAST_MS} ms of sound make an item, it has "
                f"{self.duration_ms:.2f} ms"
            )
            raise RealtimeError("input_audio_buffer_commit_empty", message)
        self._flush()
        return bytes(self._samples)

    @property
    def returned_ms(self) -> float:
        """Time of the end of the samples that `add` has returned, since the session began."""
        return self._reader.given_ms - len(self._flushed) / _SAMPLES_PER_MS

    def between(self, begin_ms: float, end_ms: float) -> bytes:
        """The sound of a time, as far as it is here."""
        return bytes(self._samples[self._place(begin_ms) : self._place(end_ms)])

    def forget_before(self, ms: float) -> None:
        """Forgets the sound before a time."""
        del self._samples[: self._place(ms)]
        self._begin_ms = max(self._begin_ms, ms)

    def _place(self, ms: float) -> int:
        """Where the sound of a time begins in the bytes."""
        first_ms = self._reader.given_ms - len(self._samples) / _BYTES_PER_MS
        return BYTES_PER_SAMPLE * round(max(0.0, ms - first_ms) * _SAMPLES_PER_MS)

    def _flush(self) -> None:
        samples = self._reader.flush()
        self._samples += _bytes(samples)
        self._flushed = np.concatenate([self._flushed, samples])

    def clear(self) -> None:
        """Forgets all of it."""
        self._flush()
        self._samples, self._begin_ms = bytearray(), self._reader.received_ms


def _bytes(samples: np.ndarray) -> bytes:
    return samples.astype("<i2", copy=False).tobytes()
