"""Opus for speech, by the libopus that comes with PyAV."""

from fractions import Fraction

import av
import numpy as np
import soxr
from av.audio.codeccontext import AudioCodecContext
from av.error import FFmpegError

from gateway.dialects.realtime.settings.session_config import PCM_RATE_HZ

OPUS_RATE_HZ = 48_000  # of its timestamps, whatever the sound has
FRAME_MS = 20
FRAME_SAMPLES = PCM_RATE_HZ * FRAME_MS // 1000
# Speech, one channel, all of the model's 12 kHz. Complexity 5 of 10 takes half the time and sounds the same as speech.
# A receiver fills gaps by what the next packet repeats of the one before (fec).
_BITS_PER_S = 32_000
_OPTIONS = {"application": "voip", "frame_duration": str(FRAME_MS), "compression_level": "5"}
_REPAIRED = {"fec": "1", "packet_loss": "5"}
_NO_FRAME_COUNT = 0xFC  # of the first byte of a packet: leaves a packet of one frame
_MOST_CONCEALED = 3  # frames: more would be a drone


class OpusDecoder:
    """Packets in, mono PCM16 at 24 kHz out, with as many samples as time has passed at the client."""

    def __init__(self) -> None:
        codec = av.CodecContext.create("libopus", "r")
        assert isinstance(codec, AudioCodecContext)
        codec.format, codec.layout, codec.sample_rate = av.AudioFormat("s16"), av.AudioLayout("mono"), OPUS_RATE_HZ
        self._codec, self._last = codec, b""
        self._resampler = soxr.ResampleStream(OPUS_RATE_HZ, PCM_RATE_HZ, 1, "int16", "LQ")  # delays by 2 ms

    def decode(self, packet: bytes) -> tuple[bytes, int]:
        """The sound of a packet, and its length at OPUS_RATE_HZ; 0: it is none of Opus."""
        samples = self._decoded(packet)
        if len(samples):
            self._last = packet[:1]
        return self._resampled(samples), len(samples)

    def conceal(self, samples: int) -> bytes:
        """The sound of `samples` at OPUS_RATE_HZ that are missing: what was heard before fades, then silence."""
        pieces = list[np.ndarray]()
        # a packet of its first byte alone has a frame of no bytes, which is how Opus is told that one is lost
        lost = bytes([self._last[0] & _NO_FRAME_COUNT]) if self._last else b""
        left = samples
        for _ in range(_MOST_CONCEALED if lost else 0):
            if left <= 0 or not len(piece := self._decoded(lost)[:left]):
                break
            pieces.append(piece)
            left -= len(piece)
        return self._resampled(np.concatenate([*pieces, np.zeros(left, np.int16)]))

    def _decoded(self, packet: bytes) -> np.ndarray:
        try:
            frames = self._codec.decode(av.Packet(packet))
        except FFmpegError:
            return np.empty(0, np.int16)
        return np.concatenate([np.empty(0, np.int16), *(frame.to_ndarray()[0] for frame in frames)])

    def _resampled(self, samples: np.ndarray) -> bytes:
        return self._resampler.resample_chunk(samples).astype("<i2", copy=False).tobytes()


class OpusEncoder:
    """Frames of FRAME_SAMPLES in, mono PCM16 at 24 kHz; packets out. `repaired`: packets help to fill gaps."""

    def __init__(self, repaired: bool) -> None:
        codec = av.CodecContext.create("libopus", "w")
        assert isinstance(codec, AudioCodecContext)
        codec.bit_rate, codec.format, codec.layout = _BITS_PER_S, av.AudioFormat("s16"), av.AudioLayout("mono")
        codec.sample_rate, codec.time_base = PCM_RATE_HZ, Fraction(1, PCM_RATE_HZ)
        codec.options = _OPTIONS | (_REPAIRED if repaired else {})
        self._codec, self._at = codec, 0

    def encode(self, pcm16: bytes) -> bytes:
        samples = np.frombuffer(pcm16, "<i2").reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = PCM_RATE_HZ, self._at, self._codec.time_base
        self._at += samples.shape[1]
        return b"".join(map(bytes, self._codec.encode(frame)))
