"""Decoding of images, audio and video, with the thinker's limits.

What cannot be decoded, or is too large, raises InvalidMedia, which names `file.field`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from services.common.media import MediaError, images, media_errors
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import MediaFile

if TYPE_CHECKING:
    import av
    from PIL.Image import Image

CODEC_SLACK_S = 1.0
"""Encoders fill up their last frame: more may be decoded than the header says."""

_MAX_ASPECT_RATIO = 200  # longer to shorter side; image processors refuse more

FrameSampler = Callable[[int, float], np.ndarray]
"""From the number of frames and the frame rate of a video: indices of the frames to take, ascending."""


@dataclass(frozen=True)
class Video:
    """`frames` are (n, height, width, 3) uint8, RGB; `sound` is (samples) float32, mono, None without a sound track."""

    frames: np.ndarray
    sound: np.ndarray | None


def decode_image(file: MediaFile, limits: ThinkerSettings) -> "Image":
    """The image as viewers show it: see `services.common.media.images`."""
    with media_errors(file.field):
        image = images.decode_image(file.data, limits.max_image_pixels)
        _check_ratio("image", *image.size)
        return image


def decode_audio(file: MediaFile, sample_rate_hz: int, limits: ThinkerSettings) -> np.ndarray:
    """The file's audio track: (samples) float32 in -1 to 1, mono (mean of the channels), at `sample_rate_hz`."""
    with media_errors(file.field):
        return _sound(file.data, sample_rate_hz, limits.max_audio_s)


def decode_video(file: MediaFile, sample_rate_hz: int, sampler: FrameSampler, limits: ThinkerSettings) -> Video:
    """The frames that `sampler` picks of the file's video track, as players show them, and its sound."""
    from services.common.media.containers import claimed_s, opened, video_track
    from services.thinker.frames import display_size

    with media_errors(file.field):
        with opened(file.data, "video") as container:
            track = video_track(container)
            _refuse_longer("video", claimed_s(container, track, file.data), limits.max_video_s)
            total = track.frames or sum(1 for packet in container.demux(track) if packet.size)
            rate = float(track.average_rate or track.guessed_rate or 0)
            if not total or not rate or not track.width:
                raise MediaError("the video has no frames, or no frame rate")
            _refuse_longer("video", total / rate, limits.max_video_s)
            wanted = sampler(total, rate)
            width, height = display_size(track)
            _check_ratio("video", width, height)
            if len(wanted) * width * height > limits.max_video_pixels:
                raise MediaError(
                    f"the video gives {len(wanted)} frames of {width} x {height}; "
                    f"at most {limits.max_video_pixels} pixels in all are taken: make it smaller or shorter"
                )
            container.seek(0)
            track.thread_type = "AUTO"
            frames = _pick(container.decode(track), wanted, (width, height))
            if not frames:
                raise MediaError("the video has no frames that can be decoded")
            has_sound = bool(container.streams.audio)
        sound = _sound(file.data, sample_rate_hz, limits.max_video_s) if has_sound else None
        return Video(np.stack(frames), sound)


def _pick(decoded: "Iterator[av.VideoFrame]", wanted: np.ndarray, size: tuple[int, int]) -> list[np.ndarray]:
    """The frames at the `wanted` indices. The last frame stands for those that the container promised and lacks."""
    from services.thinker.frames import shown

    frames: list[np.ndarray] = []
    last = None
    for index, frame in enumerate(decoded):
        last = frame
        while len(frames) < len(wanted) and wanted[len(frames)] == index:
            frames.append(shown(frame, size))
        if len(frames) == len(wanted):
            return frames
    if last is not None:
        frames += [shown(last, size)] * (len(wanted) - len(frames))
    return frames


def _sound(data: bytes, sample_rate_hz: int, max_s: float) -> np.ndarray:
    from services.common.media.containers import claimed_s, opened, sound_track
    from services.common.media.sound import read_sound

    with opened(data, "audio") as container:
        _refuse_longer("audio", claimed_s(container, sound_track(container), data), max_s)
    pieces: list[np.ndarray] = []
    samples = 0
    for piece in read_sound(data, sample_rate_hz):
        pieces.append(piece)
        samples += len(piece)
        if samples > (max_s + CODEC_SLACK_S) * sample_rate_hz:
            raise MediaError(f"the audio is longer than the {max_s:g} s allowed")
    if not samples:
        raise MediaError("the audio has no content: its length is zero")
    return np.concatenate(pieces)


def _refuse_longer(kind: str, duration_s: float, max_s: float) -> None:
    if not duration_s <= max_s:  # NaN neither
        raise MediaError(f"the {kind} is {duration_s:.0f} s long; at most {max_s:g} s are allowed")


def _check_ratio(kind: str, width: int, height: int) -> None:
    if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
        size = f"{width} x {height} pixels"
        raise MediaError(f"the {kind} is {size}; a side may be at most {_MAX_ASPECT_RATIO} times the other")
