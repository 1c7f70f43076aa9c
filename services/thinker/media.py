"""Decoding of images, audio and video, with the thinker's limits.

What cannot be decoded, or is too large, raises InvalidMedia, which names `file.field`. Headers are read first, of all
files of a request: what it costs is known before anything is decoded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.common.media import MediaError, media_errors
from services.common.media.calls import Read, refuse_longer
from services.common.media.calls import read as read_here
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import MediaFile

CODEC_SLACK_S = 1.0
"""Encoders fill up their last frame: more may be decoded than the header says."""

_MAX_ASPECT_RATIO = 200  # longer to shorter side; image processors refuse more

FrameSampler = Callable[[int, float], np.ndarray]
"""From the number of frames and the frame rate of a video: indices of the frames to take, ascending."""


@dataclass
class Spent:
    """What the media of one request cost, in sum. Its methods raise MediaError: it is more than `limits` allow."""

    limits: ThinkerSettings
    image_pixels: int = field(init=False, default=0)
    video_pixels: int = field(init=False, default=0)
    video_frames: int = field(init=False, default=0)
    sound_s: float = field(init=False, default=0.0)

    def image(self, width: int, height: int) -> None:
        self.image_pixels += width * height
        self._check(self.image_pixels, self.limits.max_request_image_pixels, "pixels of images")

    def video(self, taken: int, width: int, height: int, frames: int) -> None:
        self.video_pixels += taken * width * height
        self._check(self.video_pixels, self.limits.max_video_pixels, "pixels of frames of videos")
        self.video_frames += frames
        self._check(self.video_frames, self.limits.max_request_video_frames, "frames of videos")

    def sound(self, seconds: float) -> None:
        self.sound_s += seconds
        self._check(self.sound_s, self.limits.max_request_sound_s, "seconds of sound")

    @staticmethod
    def _check(spent: float, most: float, what: str) -> None:
        if spent > most:
            raise MediaError(f"the request has {spent:.0f} {what} with this file; at most {most:g} are taken in all")


@dataclass(frozen=True)
class VideoTrack:
    """`size` is (width, height), as players show it; `wanted` are the indices of the frames to take; `rate` is frames a
    second."""

    frames: int
    rate: float
    size: tuple[int, int]
    wanted: np.ndarray
    has_sound: bool

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


@dataclass(frozen=True)
class Video:
    """`frames` are (n, height, width, 3) uint8, RGB; `sound` is (samples) float32, mono, None without a sound track."""

    frames: np.ndarray
    sound: np.ndarray | None


def image_size(file: MediaFile, limits: ThinkerSettings, spent: Spent, read: Read = read_here) -> tuple[int, int]:
    """(width, height), by the header alone."""
    with media_errors(file.field):
        ((width, height),) = read("image_size", file.data, limits.max_image_pixels)
        _check_ratio("image", width, height)
        spent.image(width, height)
        return width, height


def sound_length(file: MediaFile, limits: ThinkerSettings, spent: Spent, read: Read = read_here) -> float:
    """The seconds that the headers claim; 0.0 if they claim none."""
    with media_errors(file.field):
        (seconds,) = read("sound_s", file.data, limits.max_audio_s)
        spent.sound(seconds)
        return seconds


def video_track(
    file: MediaFile, sampler: FrameSampler, limits: ThinkerSettings, spent: Spent, read: Read = read_here
) -> VideoTrack:
    """What will be decoded, by the headers, or by the number of packets."""
    with media_errors(file.field):
        track = _video_track(file.data, sampler, limits, read)
        spent.video(len(track.wanted), *track.size, track.frames)
        return track


def decode_image(file: MediaFile, limits: ThinkerSettings, read: Read = read_here) -> np.ndarray:
    """The image as viewers show it, (height, width, 3) uint8, RGB: see `services.common.media.images`."""
    with media_errors(file.field):
        (image,) = read("image", file.data, limits.max_image_pixels)
        _check_ratio("image", *image.shape[:2])
        return image


def decode_audio(
    file: MediaFile, sample_rate_hz: int, limits: ThinkerSettings, spent: Spent | None = None, read: Read = read_here
) -> np.ndarray:
    """The file's audio track: (samples) float32 in -1 to 1, mono (mean of the channels), at `sample_rate_hz`."""
    with media_errors(file.field):
        return _sound(file.data, sample_rate_hz, limits.max_audio_s, spent or Spent(limits), read)


def decode_video(
    file: MediaFile,
    sample_rate_hz: int,
    sampler: FrameSampler,
    limits: ThinkerSettings,
    spent: Spent | None = None,
    read: Read = read_here,
    scale: Callable[[np.ndarray], np.ndarray] = lambda frame: frame,
    track: VideoTrack | None = None,
) -> Video:
    """The frames that `sampler` picks of the file's video track, as players show them, and its sound.

    Args:
        scale: takes a frame when it is decoded.
        track: what `video_track` said of it, if it was called.
    """
    with media_errors(file.field):
        track = track or _video_track(file.data, sampler, limits, read)
        wanted = track.wanted.tolist()
        frames = [scale(frame) for frame in read("frames", file.data, *track.size, wanted)]
        if not frames:
            raise MediaError("the video has no frames that can be decoded")
        frames += frames[-1:] * (len(wanted) - len(frames))
        sound = None
        if track.has_sound:
            sound = _sound(file.data, sample_rate_hz, limits.max_video_s, spent or Spent(limits), read)
        return Video(np.stack(frames), sound)


def _video_track(data: bytes, sampler: FrameSampler, limits: ThinkerSettings, read: Read) -> VideoTrack:
    ((total, rate, width, height, has_sound),) = read("video", data, limits.max_video_s)
    refuse_longer("video", total / rate, limits.max_video_s)
    if total > limits.max_request_video_frames:
        raise MediaError(f"the video has {total} frames; at most {limits.max_request_video_frames} are read")
    wanted = sampler(total, rate)
    _check_ratio("video", width, height)
    if len(wanted) * width * height > limits.max_video_pixels:
        raise MediaError(
            f"the video gives {len(wanted)} frames of {width} x {height}; "
            f"at most {limits.max_video_pixels} pixels in all are taken: make it smaller or shorter"
        )
    return VideoTrack(total, rate, (width, height), wanted, has_sound)


def _sound(data: bytes, sample_rate_hz: int, max_s: float, spent: Spent, read: Read) -> np.ndarray:
    pieces: list[np.ndarray] = []
    samples = 0
    for piece in read("sound", data, sample_rate_hz, max_s):
        spent.sound(len(piece) / sample_rate_hz)
        pieces.append(piece)
        samples += len(piece)
        if samples > (max_s + CODEC_SLACK_S) * sample_rate_hz:
            raise MediaError(f"the audio is longer than the {max_s:g} s allowed")
    if not samples:
        raise MediaError("the audio has no content: its length is zero")
    return np.concatenate(pieces)


def _check_ratio(kind: str, width: int, height: int) -> None:
    if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
        size = f"{width} x {height} pixels"
        raise MediaError(f"the {kind} is {size}; a side may be at most {_MAX_ASPECT_RATIO} times the other")
