"""Sound of a Live session's client: of the format that it asks for, to and from PCM16 at 24 kHz."""

import numpy as np
import soxr

from gateway.dialects.live.session_config import LiveFormat
from gateway.dialects.realtime import g711
from gateway.dialects.realtime.audio import LAWS, OutputAudioStream
from gateway.dialects.realtime.settings.session_config import PCM_RATE_HZ
from gateway.media.encode import BYTES_PER_SAMPLE

_SILENCE = {"audio/pcm": b"\0", "audio/pcmu": b"\xff", "audio/pcma": b"\xd5"}


class ClientSound:
    """What a client sends. A realtime session reads PCM at 24 kHz only, and G.711."""

    def __init__(self, audio_format: LiveFormat) -> None:
        self._format, self._rest = audio_format, b""
        self._to_24k = soxr.ResampleStream(audio_format.rate_hz, PCM_RATE_HZ, 1, "int16")
        self._bytes_per_ms = audio_format.rate_hz / 1000 * (1 if audio_format.type in LAWS else BYTES_PER_SAMPLE)

    def ms_of(self, data: bytes) -> float:
        return len(data) / self._bytes_per_ms

    def silence_as(self, data: bytes) -> bytes:
        return _SILENCE[self._format.type] * len(data)

    def for_session(self, data: bytes) -> bytes:
        """As the realtime session reads it."""
        return data if self._format.type in LAWS else self.pcm16(data)

    def pcm16(self, data: bytes) -> bytes:
        """At 24 kHz. Half a sample waits for its other half."""
        if (law := LAWS.get(self._format.type)) is not None:
            return self._to_24k.resample_chunk(g711.decode(data, law)).tobytes()
        if self._format.rate_hz == PCM_RATE_HZ:
            return data
        data = self._rest + data
        whole = len(data) // BYTES_PER_SAMPLE * BYTES_PER_SAMPLE
        data, self._rest = data[:whole], data[whole:]
        return self._to_24k.resample_chunk(np.frombuffer(data, "<i2")).tobytes()


class AnswerSound:
    """What a client receives, from PCM16 at 24 kHz."""

    def __init__(self, audio_format: LiveFormat) -> None:
        self._g711 = OutputAudioStream(audio_format.type, PCM_RATE_HZ) if audio_format.type in LAWS else None
        rate_hz = audio_format.rate_hz
        self._resampler = soxr.ResampleStream(PCM_RATE_HZ, rate_hz, 1, "int16") if rate_hz != PCM_RATE_HZ else None

    def encode(self, pcm16: bytes) -> bytes:
        if self._g711 is not None:
            return self._g711.add(pcm16)
        if self._resampler is None:
            return pcm16
        return self._resampler.resample_chunk(np.frombuffer(pcm16, "<i2")).tobytes()
