"""Writes a video, with its sound. Blocking: call these in a thread."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.container import OutputContainer
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

from gateway.media.encode import AudioTrack, audio_frame, to_pcm16

# Nearly lossless to the eye: keeps the model's detail.
_X264_OPTIONS = {"crf": "17", "preset": "medium"}
_MAX_RATE_DENOMINATOR = 1001  # as in 24000/1001
_AAC_BIT_RATE = 96_000  # a channel


class VideoFile:
    """An H.264 file in MP4, 4:2:0 in BT.709, whose index comes first: it plays while it loads. Odd sizes, which 4:2:0
    lacks, get their last column or row twice. Its sound is AAC.

    Args:
        path: complete only after `close`.
        sound: (samples, 1 or 2 channels) float32, -1 to 1; None: the video is silent.
    """

    def __init__(
        self,
        path: Path,
        frames_per_second: float,
        width: int,
        height: int,
        sound: np.ndarray | None = None,
        sample_rate_hz: int = 0,
    ) -> None:
        self.path, self.width, self.height, self.frames = path, width, height, 0
        self._container = av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})
        self._rate = Fraction(frames_per_second).limit_denominator(_MAX_RATE_DENOMINATOR)
        stream = self._container.add_stream("libx264", rate=self._rate, options=_X264_OPTIONS)
        assert isinstance(stream, av.VideoStream)
        self._stream = stream
        stream.width, stream.height = width + width % 2, height + height % 2
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.color_range, context.colorspace = ColorRange.MPEG, Colorspace.ITU709
        context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        self._sound = None if sound is None else _Soundtrack(self._container, sound, sample_rate_hz)

    def add(self, frames: np.ndarray) -> None:
        """Appends (n, height, width, 3) uint8 RGB frames. Raises ValueError: another shape or dtype."""
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
            if self._sound is not None:
                self._sound.write_until(self.frames / self._rate)

    def close(self) -> None:
        if self._sound is not None:
            self._sound.close()
        self._container.mux(self._stream.encode(None))
        self._container.close()

    def abandon(self) -> None:
        try:
            self._container.close()
        finally:
            self.path.unlink(missing_ok=True)


class _Soundtrack:
    """Sound that is written beside the frames of its time, so that players find both together."""

    def __init__(self, container: OutputContainer, samples: np.ndarray, rate_hz: int) -> None:
        self._samples, self._rate_hz, self._written = samples, rate_hz, 0
        self._track = AudioTrack(container, "aac", rate_hz, samples.shape[1], _AAC_BIT_RATE)

    def write_until(self, time_s: Fraction) -> None:
        self._write(self._samples[self._written : int(time_s * self._rate_hz)])

    def close(self) -> None:
        """Writes the rest."""
        self._write(self._samples[self._written :])
        self._track.close()

    def _write(self, samples: np.ndarray) -> None:
        frame = audio_frame(to_pcm16(samples), self._rate_hz, samples.shape[1])
        if frame is not None:
            frame.pts, frame.time_base = self._written, Fraction(1, self._rate_hz)
            self._track.add(frame)
            self._written += len(samples)
