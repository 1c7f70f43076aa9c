"""Writes frames as an MP4. Blocking: call it in a thread, one call at a time."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

# Nearly lossless to the eye: the model's own detail is not to be lost here.
_ENCODER = {"crf": "17", "preset": "medium"}
MAX_SIDE_PIXELS = 16_384  # of H.264; x264 opens for no more
_MAX_RATE_DENOMINATOR = 1001  # as in 24000/1001


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
        stream = self._container.add_stream("libx264", rate=rate, options=_ENCODER)
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
