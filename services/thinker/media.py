"""Decoding of images, audio and video, with the thinker's limits.

What cannot be decoded, or is too large, raises InvalidMedia, which names `file.field`. Headers are read first, of all
files of a request: what it costs is known before anything is decoded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from services.common.errors import RequestCancelled
from services.common.media import MediaError, images, media_errors
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import MediaFile
from services.thinker.tokens import Stop, never

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from PIL.Image import Image

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
    """`size` is (width, height), as players show it; `wanted` are the indices of the frames to take."""

    frames: int
    size: tuple[int, int]
    wanted: np.ndarray


@dataclass(frozen=True)
class Video:
    """`frames` are (n, height, width, 3) uint8, RGB; `sound` is (samples) float32, mono, None without a sound track."""

    frames: np.ndarray
    sound: np.ndarray | None


def image_size(file: MediaFile, limits: ThinkerSettings, spent: Spent) -> tuple[int, int]:
    """(width, height), by the header alone."""
    with media_errors(file.field), images.open_image(file.data, limits.max_image_pixels) as image:
        _check_ratio("image", *image.size)
        spent.image(*image.size)
        return image.size


def sound_length(file: MediaFile, limits: ThinkerSettings, spent: Spent) -> float:
    """The seconds that the headers claim; 0.0 if they claim none."""
    from services.common.media.containers import claimed_s, opened, sound_track

    with media_errors(file.field), opened(file.data, "audio") as container:
        seconds = claimed_s(container, sound_track(container), file.data)
        _refuse_longer("audio", seconds, limits.max_audio_s)
        spent.sound(seconds)
        return seconds


def video_track(file: MediaFile, sampler: "FrameSampler", limits: ThinkerSettings, spent: Spent) -> VideoTrack:
    """What will be decoded, by the headers, or by the number of packets."""
    from services.common.media.containers import opened

    with media_errors(file.field), opened(file.data, "video") as container:
        track = _video_track(container, file.data, sampler, limits)
        spent.video(len(track.wanted), *track.size, track.frames)
        return track


def decode_image(file: MediaFile, limits: ThinkerSettings) -> "Image":
    """The image as viewers show it: see `services.common.media.images`."""
    with media_errors(file.field):
        image = images.decode_image(file.data, limits.max_image_pixels)
        _check_ratio("image", *image.size)
        return image


def decode_audio(
    file: MediaFile, sample_rate_hz: int, limits: ThinkerSettings, spent: Spent | None = None, stop: Stop = never
) -> np.ndarray:
    """The file's audio track: (samples) float32 in -1 to 1, mono (mean of the channels), at `sample_rate_hz`.

    Raises RequestCancelled: `stop` says so.
    """
    with media_errors(file.field):
        return _sound(file.data, sample_rate_hz, limits.max_audio_s, spent or Spent(limits), stop)


def decode_video(
    file: MediaFile,
    sample_rate_hz: int,
    sampler: FrameSampler,
    limits: ThinkerSettings,
    spent: Spent | None = None,
    stop: Stop = never,
    scale: Callable[[np.ndarray], np.ndarray] = lambda frame: frame,
) -> Video:
    """The frames that `sampler` picks of the file's video track, as players show them, and its sound.

    Args:
        scale: takes a frame when it is decoded.
    """
    from services.common.media.containers import opened, video_track

    with media_errors(file.field):
        with opened(file.data, "video") as container:
            found = _video_track(container, file.data, sampler, limits)
            container.seek(0)
            track = video_track(container)
            track.thread_type = "AUTO"
            frames = _pick(container.decode(track), found, stop, scale)
            if not frames:
                raise MediaError("the video has no frames that can be decoded")
            has_sound = bool(container.streams.audio)
        sound = None
        if has_sound:
            sound = _sound(file.data, sample_rate_hz, limits.max_video_s, spent or Spent(limits), stop)
        return Video(np.stack(frames), sound)


def _video_track(
    container: "InputContainer", data: bytes, sampler: FrameSampler, limits: ThinkerSettings
) -> VideoTrack:
    from services.common.media.containers import claimed_s, video_track
    from services.thinker.frames import display_size

    track = video_track(container)
    _refuse_longer("video", claimed_s(container, track, data), limits.max_video_s)
    total = track.frames or sum(1 for packet in container.demux(track) if packet.size)
    rate = float(track.average_rate or track.guessed_rate or 0)
    if not total or not rate or not track.width:
        raise MediaError("the video has no frames, or no frame rate")
    _refuse_longer("video", total / rate, limits.max_video_s)
    if total > limits.max_request_video_frames:
        raise MediaError(f"the video has {total} frames; at most {limits.max_request_video_frames} are read")
    wanted = sampler(total, rate)
    width, height = display_size(track)
    _check_ratio("video", width, height)
    if len(wanted) * width * height > limits.max_video_pixels:
        raise MediaError(
            f"the video gives {len(wanted)} frames of {width} x {height}; "
            f"at most {limits.max_video_pixels} pixels in all are taken: make it smaller or shorter"
        )
    return VideoTrack(total, (width, height), wanted)


def _pick(
    decoded: "Iterator[av.VideoFrame]", track: VideoTrack, stop: Stop, scale: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray]:
    """The wanted frames. The last frame stands for those that the container promised and lacks."""
    from services.thinker.frames import shown

    frames: list[np.ndarray] = []
    last, wanted = None, track.wanted
    for index, frame in enumerate(decoded):
        _check_wanted(stop)
        last = frame
        while len(frames) < len(wanted) and wanted[len(frames)] == index:
            frames.append(scale(shown(frame, track.size)))
        if len(frames) == len(wanted):
            return frames
    if last is not None:
        frames += [scale(shown(last, track.size))] * (len(wanted) - len(frames))
    return frames


def _sound(data: bytes, sample_rate_hz: int, max_s: float, spent: Spent, stop: Stop) -> np.ndarray:
    from services.common.media.containers import claimed_s, opened, sound_track
    from services.common.media.sound import read_sound

    with opened(data, "audio") as container:
        _refuse_longer("audio", claimed_s(container, sound_track(container), data), max_s)
    pieces: list[np.ndarray] = []
    samples = 0
    for piece in read_sound(data, sample_rate_hz):
        _check_wanted(stop)
        spent.sound(len(piece) / sample_rate_hz)
        pieces.append(piece)
        samples += len(piece)
        if samples > (max_s + CODEC_SLACK_S) * sample_rate_hz:
            raise MediaError(f"the audio is longer than the {max_s:g} s allowed")
    if not samples:
        raise MediaError("the audio has no content: its length is zero")
    return np.concatenate(pieces)


def _check_wanted(stop: Stop) -> None:
    if stop():
        raise RequestCancelled("nobody waits for the media any more")


def _refuse_longer(kind: str, duration_s: float, max_s: float) -> None:
    if not duration_s <= max_s:  # NaN neither
        raise MediaError(f"the {kind} is {duration_s:.0f} s long; at most {max_s:g} s are allowed")


def _check_ratio(kind: str, width: int, height: int) -> None:
    if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
        size = f"{width} x {height} pixels"
        raise MediaError(f"the {kind} is {size}; a side may be at most {_MAX_ASPECT_RATIO} times the other")
