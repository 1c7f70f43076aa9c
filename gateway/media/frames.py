"""Lists of frames, as vLLM's clients send videos."""

import io
import sys
from collections.abc import Sequence
from fractions import Fraction

import av

from services.common.media import MediaError
from services.common.media.images import open_image

FRAMES_PER_S = 1
"""As vLLM takes them."""
MAX_FRAMES = 20_000
"""More than the longest video has by default."""


def as_video(frames: Sequence[bytes]) -> bytes:
    """A Matroska file with JPEG files, untouched, as its frames. The last one may be there twice: models read pairs.

    Raises:
        MediaError: one is no JPEG file, or not of the first one's size.
    """
    first = _size(frames[0], 0)
    for i, frame in enumerate(frames):
        if (size := _size(frame, i)) != first:
            raise MediaError(f"frame {i} has {size[0]} x {size[1]} pixels, but frame 0 has {first[0]} x {first[1]}")
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        track = container.add_stream("mjpeg", rate=FRAMES_PER_S)
        track.width, track.height = first
        track.pix_fmt = "yuvj420p"  # of the header; each frame has its own
        for i, frame in enumerate([*frames, *frames[len(frames) - len(frames) % 2 :]]):
            packet = av.Packet(frame)
            packet.stream, packet.pts, packet.dts, packet.duration = track, i, i, 1
            packet.time_base, packet.is_keyframe = Fraction(1, FRAMES_PER_S), True
            container.mux(packet)
    return file.getvalue()


def _size(frame: bytes, index: int) -> tuple[int, int]:
    with open_image(frame, sys.maxsize) as image:
        if image.format != "JPEG":
            raise MediaError(f"frame {index} is a {image.format} file; send JPEG files")
        return image.size
