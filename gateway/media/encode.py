"""Writes files of sound, images and video. Blocking: call these in a thread."""

import io
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
import soundfile
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from PIL import Image

BYTES_PER_SAMPLE = 2  # of PCM16

ImageFormat = Literal["png", "jpeg", "webp"]
# Largest width and height that the encoders write; x264 opens for no more.
MAX_SIDE_PIXELS = {"png": 2**31 - 1, "jpeg": 65_500, "webp": 16_383, "H.264": 16_384}
_FULL_COLOUR_FROM = 90  # quality from which a JPEG keeps its colours at full resolution

# Nearly lossless to the eye: the model's own detail is not to be lost here.
_X264_OPTIONS = {"crf": "17", "preset": "medium"}
_MAX_RATE_DENOMINATOR = 1001  # as in 24000/1001

_LAYOUTS = {1: "mono", 2: "stereo"}


def encode_audio(pcm16: bytes, sample_rate_hz: int, audio_format: str, channels: int = 1) -> bytes:
    """A whole file of sound.

    Args:
        pcm16: samples, 16 bit, little-endian; those of all channels at one time follow one another.
        sample_rate_hz: samples a second.
        audio_format: "wav" (PCM16), "mp3", "flac", "opus" (in Ogg), "aac" (ADTS) or "pcm16" (no header).
        channels: 1 or 2.
    """
    if audio_format == "pcm16":
        return pcm16
    return _AUDIO_ENCODERS[audio_format](pcm16, sample_rate_hz, channels)


def _lossless(file_format: str, pcm16: bytes, sample_rate_hz: int, channels: int) -> bytes:
    file = io.BytesIO()
    samples = np.frombuffer(pcm16, "<i2").reshape(-1, channels)
    soundfile.write(file, samples, sample_rate_hz, format=file_format, subtype="PCM_16")
    return file.getvalue()


def _lossy(container_format: str, codec: str, bit_rate: int, pcm16: bytes, sample_rate_hz: int, channels: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container_format) as container:
        rate_hz = _nearest_rate_hz(codec, sample_rate_hz)
        layout = _LAYOUTS[channels]
        stream = container.add_stream(codec, rate=rate_hz, layout=layout, bit_rate=bit_rate * channels)
        assert isinstance(stream, av.AudioStream)
        stream.codec_context.open()
        frame_size = stream.codec_context.frame_size or None
        resampler = av.AudioResampler(stream.codec_context.format, layout, rate_hz, frame_size)
        if pcm16:
            samples = np.frombuffer(pcm16, "<i2").reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout=layout)
            frame.sample_rate = sample_rate_hz
            for resampled in (*resampler.resample(frame), *resampler.resample(None)):
                container.mux(stream.encode(resampled))
        container.mux(stream.encode(None))
    return file.getvalue()


def _nearest_rate_hz(codec: str, sample_rate_hz: int) -> int:
    """The codec's own rate for this sound: the lowest that loses nothing, else its highest."""
    rates = av.Codec(codec, "w").audio_rates or [sample_rate_hz]
    return min((rate for rate in rates if rate >= sample_rate_hz), default=max(rates))


_AUDIO_ENCODERS: dict[str, Callable[[bytes, int, int], bytes]] = {
    "wav": partial(_lossless, "WAV"),
    "flac": partial(_lossless, "FLAC"),
    "mp3": partial(_lossy, "mp3", "libmp3lame", 64_000),
    "opus": partial(_lossy, "ogg", "libopus", 48_000),
    "aac": partial(_lossy, "adts", "aac", 64_000),
}


def encode_image(pixels: np.ndarray, file_format: ImageFormat, quality: int) -> bytes:
    """A picture's file.

    Args:
        pixels: (height, width, 3) uint8, red, green, blue.
        file_format: PNG keeps every pixel.
        quality: 0 to 100, of JPEG and WebP; 100 is the best.
    """
    options: dict[str, Any] = {}
    if file_format == "jpeg":
        options = {"quality": max(1, quality), "subsampling": 0 if quality >= _FULL_COLOUR_FROM else 2}
    elif file_format == "webp":
        options = {"quality": quality}
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, file_format, **options)
    return file.getvalue()


class VideoFile:
    """An H.264 file in an MP4 container, 4:2:0 in BT.709, whose index comes first so that it plays while it loads.

    4:2:0 has no odd sizes: an odd width or height is made even by repeating the last column or row.

    Args:
        path: file to write; it is complete after `close`.
        frames_per_second: rate, above 0.
        width: pixels of each frame.
        height: pixels of each frame.
    """

    def __init__(self, path: Path, frames_per_second: float, width: int, height: int) -> None:
        self.path, self.width, self.height, self.frames = path, width, height, 0
        self._container = av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})
        rate = Fraction(frames_per_second).limit_denominator(_MAX_RATE_DENOMINATOR)
        stream = self._container.add_stream("libx264", rate=rate, options=_X264_OPTIONS)
        assert isinstance(stream, av.VideoStream)
        self._stream = stream
        stream.width, stream.height = width + width % 2, height + height % 2
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.color_range, context.colorspace = ColorRange.MPEG, Colorspace.ITU709
        context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709

    def add(self, frames: np.ndarray) -> None:
        """Appends frames (n, height, width, 3), red, green, blue, uint8.

        Raises:
            ValueError: another shape or dtype.
        """
        if frames.dtype != np.uint8 or frames.shape[1:] != (self.height, self.width, 3):
            raise ValueError(f"frames of {frames.shape[1:]} {frames.dtype}, not ({self.height}, {self.width}, 3) uint8")
        frames = np.pad(frames, ((0, 0), (0, self.height % 2), (0, self.width % 2), (0, 0)), mode="edge")
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame = frame.reformat(
                format="yuv420p",
                dst_colorspace=Colorspace.ITU709,
                src_color_range=ColorRange.JPEG,
                dst_color_range=ColorRange.MPEG,
            )
            frame.pts, frame.time_base = self.frames, 1 / Fraction(self._stream.codec_context.framerate)
            self._container.mux(self._stream.encode(frame))
            self.frames += 1

    def close(self) -> None:
        """Completes the file."""
        self._container.mux(self._stream.encode(None))
        self._container.close()

    def abandon(self) -> None:
        """Gives the file up and removes it."""
        try:
            self._container.close()
        finally:
            self.path.unlink(missing_ok=True)
