"""Decoding of images, audio and video, with limits. FFmpeg (in PyAV) reads nothing but the bytes given.

What cannot be decoded, or is too large, raises InvalidInput, which names `file.field`.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from services.common.errors import InvalidInput, require
from services.common.image_limits import MIN_IMAGE_SIDE
from services.common.media import claimed_wav_s, mono_blocks, open_image
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import MediaFile

if TYPE_CHECKING:
    from PIL.Image import Image

CODEC_SLACK_S = 1.0
"""Encoders fill up their last frame: more may be decoded than the header says."""

FrameSampler = Callable[[int, float], np.ndarray]
"""From the number of frames and the frame rate of a video: indices of the frames to take, ascending."""


@dataclass(frozen=True)
class Video:
    """`frames` are (n, height, width, 3) uint8, RGB; `sound` is (samples) float32, mono, None without a sound track."""

    frames: np.ndarray
    sound: np.ndarray | None


def decode_image(file: MediaFile, limits: ThinkerSettings) -> "Image":
    """The image upright in RGB; of an animation the first frame."""
    from PIL import ImageOps

    with open_image(file.data, file.field) as image:
        width, height = image.size
        size = f"is {width} x {height}"
        if width * height > limits.max_image_pixels:
            raise InvalidInput(file.field, f"{size}; at most {limits.max_image_pixels} pixels are taken")
        if min(width, height) < MIN_IMAGE_SIDE:
            raise InvalidInput(file.field, f"{size}; each side must have at least {MIN_IMAGE_SIDE} pixels")
        return ImageOps.exif_transpose(image).convert("RGB")


def decode_audio(file: MediaFile, sample_rate_hz: int, limits: ThinkerSettings) -> np.ndarray:
    """The file's first audio track: (samples) float32 in -1 to 1, mono (mean of the channels), at `sample_rate_hz`."""
    with _opened(file) as container:
        require(container.streams.audio, file.field, "has no audio track")
        return _sound(file, container, sample_rate_hz, limits.max_audio_s)


def decode_video(file: MediaFile, sample_rate_hz: int, sampler: FrameSampler, limits: ThinkerSettings) -> Video:
    """The frames that `sampler` picks of the file's first video track, and its sound at `sample_rate_hz`."""
    with _opened(file) as container:
        require(container.streams.video, file.field, "has no video track")
        stream = container.streams.video[0]
        _refuse_longer(file, container, stream, limits.max_video_s)
        total = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        require(total and rate, file.field, "has no frames, or no frame rate")
        if total / rate > limits.max_video_s:
            raise InvalidInput(file.field, f"lasts {total / rate:.0f} s; at most {limits.max_video_s:g} s are taken")
        wanted = sampler(total, rate)
        pixels = len(wanted) * stream.width * stream.height
        if pixels > limits.max_video_pixels:
            raise InvalidInput(
                file.field,
                f"gives {len(wanted)} frames of {stream.width} x {stream.height}; "
                f"at most {limits.max_video_pixels} pixels in all are taken: make it smaller or shorter",
            )
        container.seek(0)
        stream.thread_type = "AUTO"
        frames = _pick(container.decode(stream), wanted)
        require(frames, file.field, "has no frames that can be decoded")
    sound = None
    with _opened(file) as container:  # again from the start: decoding the frames went past the sound
        if container.streams.audio:
            sound = _sound(file, container, sample_rate_hz, limits.max_video_s)
    return Video(np.stack(frames), sound)


def _pick(decoded: Iterator[Any], wanted: np.ndarray) -> list[np.ndarray]:
    """The frames at the `wanted` indices. The last frame stands for those that the container promised and lacks."""
    frames: list[np.ndarray] = []
    last = None
    for index, frame in enumerate(decoded):
        last = frame
        while len(frames) < len(wanted) and wanted[len(frames)] == index:
            frames.append(frame.to_ndarray(format="rgb24"))
        if len(frames) == len(wanted):
            return frames
    if last is not None:
        frames += [last.to_ndarray(format="rgb24")] * (len(wanted) - len(frames))
    return frames


def _sound(file: MediaFile, container: Any, sample_rate_hz: int, max_s: float) -> np.ndarray:
    import soxr

    stream = container.streams.audio[0]
    _refuse_longer(file, container, stream, max_s)
    blocks: list[np.ndarray] = []
    samples, rate = 0, stream.rate
    for block, _ in mono_blocks(container):
        blocks.append(block)
        samples += len(block)
        if samples > (max_s + CODEC_SLACK_S) * rate:
            raise InvalidInput(file.field, f"lasts longer than the {max_s:g} s that are taken")
    require(samples, file.field, "has an audio track without a sample")
    return soxr.resample(np.concatenate(blocks), rate, sample_rate_hz).astype(np.float32)


def _refuse_longer(file: MediaFile, container: Any, stream: Any, max_s: float) -> None:
    """Refuses by the header, before anything is decoded."""
    duration_s = claimed_wav_s(file.data)
    if stream.duration and stream.time_base:
        duration_s = max(duration_s, float(stream.duration * stream.time_base))
    elif container.duration:
        duration_s = max(duration_s, container.duration / 1_000_000)  # microseconds (AV_TIME_BASE)
    require(duration_s <= max_s, file.field, f"lasts {duration_s:.0f} s; at most {max_s:g} s are taken")  # NaN neither


@contextmanager
def _opened(file: MediaFile) -> Iterator[Any]:
    import av
    from av.error import FFmpegError

    try:
        with av.open(io.BytesIO(file.data), metadata_errors="ignore") as container:
            yield container
    except (FFmpegError, ValueError, MemoryError, AttributeError) as error:
        raise InvalidInput(file.field, f"cannot be decoded as {file.kind}: {error}") from None
