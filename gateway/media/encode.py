"""Writes audio and image files. Blocking: call these in a thread."""

import contextlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import av
import numpy as np
import soundfile
from av.container import OutputContainer
from av.error import BlockingIOError as NothingReady
from av.error import EOFError as NothingLeft
from av.filter import Graph
from PIL import Image

BYTES_PER_SAMPLE = 2  # of PCM16

AUDIO_MEDIA_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
}
ImageFormat = Literal["png", "jpeg", "webp"]
# Largest width and height that the encoders write; x264 opens for no more.
MAX_SIDE_PIXELS = {"png": 2**31 - 1, "jpeg": 65_500, "webp": 16_383, "H.264": 16_384}
_FULL_COLOUR_FROM = 90  # quality from which a JPEG keeps its colours at full resolution

LAYOUTS = {1: "mono", 2: "stereo"}
_LEAST_TEMPO = 0.5  # of one `atempo`


@dataclass(frozen=True)
class _Codec:
    """libav's names of a format.

    Attributes:
        bit_rate: bits a second and channel; None: lossless.
        streamed: container options of a stream.
    """

    container: str
    name: str
    bit_rate: int | None = None
    streamed: Mapping[str, str] = field(default_factory=dict)


_CODECS = {
    "wav": _Codec("wav", "pcm_s16le"),
    "flac": _Codec("flac", "flac"),
    "mp3": _Codec("mp3", "libmp3lame", 64_000, {"write_xing": "0"}),
    "opus": _Codec("ogg", "libopus", 48_000, {"page_duration": "1"}),
    "aac": _Codec("adts", "aac", 64_000),
}


def to_pcm16(samples: np.ndarray) -> bytes:
    """Of (samples,) or (samples, channels) float32, clipped to -1 to 1; channels are interleaved."""
    return np.rint(samples * 32768.0).clip(-32768, 32767).astype("<i2").tobytes()


def encode_audio(pcm16: bytes, sample_rate_hz: int, audio_format: str, channels: int = 1) -> bytes:
    """A whole audio file.

    Args:
        pcm16: 16-bit little-endian samples, channels interleaved.
        audio_format: "wav", "mp3", "flac", "opus" (in Ogg), "aac" (ADTS) or "pcm16" (no header).
        channels: 1 or 2.
    """
    if audio_format == "pcm16":
        return pcm16
    file = io.BytesIO()
    if audio_format in ("wav", "flac"):  # soundfile writes no tags of its own
        samples = np.frombuffer(pcm16, "<i2").reshape(-1, channels)
        soundfile.write(file, samples, sample_rate_hz, format=audio_format, subtype="PCM_16")
    else:
        encoder = _Encoder(file, _CODECS[audio_format], sample_rate_hz, channels)
        encoder.add(audio_frame(pcm16, sample_rate_hz, channels))
        encoder.close()
    return file.getvalue()


class AudioTrack:
    """Writes a track of `container`.

    Args:
        codec: libav's name of its encoder.
        bit_rate: bits a second and channel; None: lossless.
    """

    def __init__(
        self, container: OutputContainer, codec: str, sample_rate_hz: int, channels: int, bit_rate: int | None
    ) -> None:
        rates = av.Codec(codec, "w").audio_rates or [sample_rate_hz]
        rate_hz = min((rate for rate in rates if rate >= sample_rate_hz), default=max(rates))  # the lowest lossless one
        rules: dict[str, Any] = {} if bit_rate is None else {"bit_rate": bit_rate * channels}
        self._container, layout = container, LAYOUTS[channels]
        stream = container.add_stream(codec, rate=rate_hz, layout=layout, **rules)
        assert isinstance(stream, av.AudioStream)
        self._stream, context = stream, stream.codec_context
        context.open()
        self._resampler = av.AudioResampler(context.format, layout, rate_hz, context.frame_size or None)

    def add(self, frame: av.AudioFrame | None) -> None:
        """Appends audio; None flushes the resampler."""
        for resampled in self._resampler.resample(frame):
            self._container.mux(self._stream.encode(resampled))

    def close(self) -> None:
        self.add(None)
        self._container.mux(self._stream.encode(None))


class _Encoder:
    """Writes an audio file to `file`, which need not be seekable."""

    def __init__(
        self, file: Any, codec: _Codec, sample_rate_hz: int, channels: int, options: dict[str, str] | None = None
    ) -> None:
        self._container = av.open(file, "w", format=codec.container, options=options)
        self._track = AudioTrack(self._container, codec.name, sample_rate_hz, channels, codec.bit_rate)
        self._container.start_encoding()

    def add(self, frame: av.AudioFrame | None) -> None:
        self._track.add(frame)

    def close(self) -> None:
        self._track.close()
        self._container.close()


def audio_frame(pcm16: bytes, sample_rate_hz: int, channels: int = 1) -> av.AudioFrame | None:
    """libav's frame of samples, as of `encode_audio`; None: there are none."""
    if not pcm16:
        return None
    samples = np.frombuffer(pcm16, "<i2").reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(samples, format="s16", layout=LAYOUTS[channels])
    frame.sample_rate = sample_rate_hz
    return frame


class AudioStream:
    """A mono audio file that is read while it is written.

    Args:
        audio_format: as of `encode_audio`. The header leaves the length open.
        speed: 0.25 to 4; the pitch stays.
    """

    def __init__(self, sample_rate_hz: int, audio_format: str, speed: float = 1.0) -> None:
        self._sample_rate_hz, self._written = sample_rate_hz, bytearray()
        self._tempo = None if speed == 1.0 else Tempo(sample_rate_hz, speed)
        self._encoder = None
        if audio_format != "pcm16":
            codec = _CODECS[audio_format]
            self._encoder = _Encoder(self, codec, sample_rate_hz, 1, {"flush_packets": "1", **codec.streamed})

    def write(self, data: bytes) -> int:
        """Takes the file's next bytes from libav."""
        self._written += data
        return len(data)

    def add(self, pcm16: bytes) -> bytes:
        """Appends samples; returns the file's next bytes."""
        if self._tempo is not None:
            pcm16 = self._tempo.add(pcm16)
        return self._encoded(pcm16)

    def close(self) -> bytes:
        rest = b"" if self._tempo is None else self._tempo.close()
        ready = self._encoded(rest)
        if self._encoder is not None:
            self._encoder.close()
        return ready + self._taken()

    def _encoded(self, pcm16: bytes) -> bytes:
        if self._encoder is None:
            return pcm16
        if (frame := audio_frame(pcm16, self._sample_rate_hz)) is not None:
            self._encoder.add(frame)
        return self._taken()

    def _taken(self) -> bytes:
        taken, self._written = bytes(self._written), bytearray()
        return taken


class Tempo:
    """Changes the speed of mono PCM16, not its pitch, by libav's `atempo` (WSOLA). Speed 2 halves the time."""

    def __init__(self, sample_rate_hz: int, speed: float) -> None:
        self._sample_rate_hz, self._samples = sample_rate_hz, 0
        self._graph = Graph()
        source = self._graph.add_abuffer(sample_rate=sample_rate_hz, format="s16", layout="mono")
        tempos = [_LEAST_TEMPO] * math.floor(math.log(min(speed, 1.0), _LEAST_TEMPO))
        tempos.append(speed / math.prod(tempos))
        filters = [self._graph.add("atempo", str(tempo)) for tempo in tempos]
        pcm16 = self._graph.add("aformat", "sample_fmts=s16")
        self._graph.link_nodes(source, *filters, pcm16, self._graph.add("abuffersink")).configure()

    def add(self, pcm16: bytes) -> bytes:
        if (frame := audio_frame(pcm16, self._sample_rate_hz)) is not None:
            frame.pts = self._samples
            self._samples += frame.samples
            self._graph.push(frame)
        return self._ready()

    def close(self) -> bytes:
        self._graph.push(None)
        return self._ready()

    def _ready(self) -> bytes:
        ready = bytearray()
        with contextlib.suppress(NothingReady, NothingLeft):
            while True:
                ready += self._graph.pull().to_ndarray().tobytes()  # pyright: ignore[reportAttributeAccessIssue]
        return bytes(ready)


def encode_image(pixels: np.ndarray, file_format: ImageFormat, quality: int) -> bytes:
    """An image file.

    Args:
        pixels: (height, width, 3) uint8 RGB.
        quality: 0 to 100, the best; for JPEG and WebP.
    """
    options: dict[str, Any] = {}
    if file_format == "jpeg":
        options = {"quality": max(1, quality), "subsampling": 0 if quality >= _FULL_COLOUR_FROM else 2}
    elif file_format == "webp":
        options = {"quality": quality}
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, file_format, **options)
    return file.getvalue()
