"""Encodes an answer's samples as the file the client asked for. Blocking: call these in a thread."""

import io
from collections.abc import Callable

import av
import numpy as np
import soundfile

BYTES_PER_SAMPLE = 2  # of PCM16

_Encoder = Callable[[bytes, int, int], bytes]
_LAYOUTS = {1: "mono", 2: "stereo"}


def encode(pcm16: bytes, sample_rate_hz: int, audio_format: str, channels: int = 1) -> bytes:
    """A whole file of sound.

    Args:
        pcm16: samples, 16 bit, little-endian; those of all channels at one time follow one another.
        sample_rate_hz: samples a second.
        audio_format: "wav" (PCM16), "mp3", "flac", "opus" (in Ogg), "aac" (ADTS) or "pcm16" (no header).
        channels: 1 or 2.
    """
    return _ENCODERS[audio_format](pcm16, sample_rate_hz, channels)


def _raw(pcm16: bytes, _sample_rate_hz: int, _channels: int) -> bytes:
    return pcm16


def _lossless(file_format: str) -> _Encoder:
    def encode_lossless(pcm16: bytes, sample_rate_hz: int, channels: int) -> bytes:
        file = io.BytesIO()
        samples = np.frombuffer(pcm16, "<i2").reshape(-1, channels)
        soundfile.write(file, samples, sample_rate_hz, format=file_format, subtype="PCM_16")
        return file.getvalue()

    return encode_lossless


def _lossy(container_format: str, codec: str, bit_rate: int) -> _Encoder:
    def encode_lossy(pcm16: bytes, sample_rate_hz: int, channels: int) -> bytes:
        file = io.BytesIO()
        with av.open(file, "w", format=container_format) as container:
            rate_hz = _nearest_rate_hz(codec, sample_rate_hz)
            layout = _LAYOUTS[channels]
            stream = container.add_stream(codec, rate=rate_hz, layout=layout, bit_rate=bit_rate * channels)
            assert isinstance(stream, av.AudioStream)
            stream.codec_context.open()
            resampler = av.AudioResampler(
                stream.codec_context.format, layout, rate_hz, stream.codec_context.frame_size or None
            )
            if pcm16:
                samples = np.frombuffer(pcm16, "<i2").reshape(1, -1)
                frame = av.AudioFrame.from_ndarray(samples, format="s16", layout=layout)
                frame.sample_rate = sample_rate_hz
                for resampled in (*resampler.resample(frame), *resampler.resample(None)):
                    container.mux(stream.encode(resampled))
            container.mux(stream.encode(None))
        return file.getvalue()

    return encode_lossy


def _nearest_rate_hz(codec: str, sample_rate_hz: int) -> int:
    """The codec's own rate for this sound: the lowest that loses nothing, else its highest."""
    rates = av.Codec(codec, "w").audio_rates or [sample_rate_hz]
    return min((rate for rate in rates if rate >= sample_rate_hz), default=max(rates))


_ENCODERS: dict[str, _Encoder] = {
    "pcm16": _raw,
    "wav": _lossless("WAV"),
    "flac": _lossless("FLAC"),
    "mp3": _lossy("mp3", "libmp3lame", 64_000),
    "opus": _lossy("ogg", "libopus", 48_000),
    "aac": _lossy("adts", "aac", 64_000),
}
