"""What is read of files, by name: what `decoders` has another process do. Arguments and results are of JSON, or arrays.

All raise MediaError.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from services.common.media import MediaError, images

_SOUND_S = 1.0  # of a piece


class Read(Protocol):
    def __call__(self, name: str, data: bytes, *arguments: Any) -> Iterator[Any]:
        """The results of the call `name`, with the file `data`."""
        ...


def read(name: str, data: bytes, *arguments: Any) -> Iterator[Any]:
    """In this process."""
    return CALLS[name](data, *arguments)


def refuse_longer(kind: str, duration_s: float, max_s: float) -> None:
    if not duration_s <= max_s:  # NaN neither
        raise MediaError(f"the {kind} is {duration_s:.0f} s long; at most {max_s:g} s are allowed")


def _image_size(data: bytes, max_pixels: int) -> Iterator[tuple[int, int]]:
    """(width, height), by the header alone."""
    with images.open_image(data, max_pixels) as image:
        yield image.size


def _image(data: bytes, max_pixels: int) -> Iterator[np.ndarray]:
    """(height, width, 3) uint8: see `images.decode_image`."""
    yield np.asarray(images.decode_image(data, max_pixels))


def _mask(data: bytes, max_pixels: int) -> Iterator[np.ndarray]:
    """(height, width) uint8: see `images.decode_mask`."""
    yield np.asarray(images.decode_mask(data, max_pixels))


def _sound_s(data: bytes, max_s: float) -> Iterator[float]:
    """The seconds that the headers claim; 0.0 if they claim none."""
    from services.common.media.containers import claimed_s, opened, sound_track

    with opened(data, "audio") as container:
        seconds = claimed_s(container, sound_track(container), data)
        refuse_longer("audio", seconds, max_s)
        yield seconds


def _sound(data: bytes, rate_hz: int, max_s: float) -> Iterator[np.ndarray]:
    """Pieces of (samples) float32: see `sound.read_sound`. Of `max_s` by the headers; it may be longer."""
    from services.common.media.sound import read_sound

    for _ in _sound_s(data, max_s):
        pass
    pieces, samples = list[np.ndarray](), 0
    for piece in read_sound(data, rate_hz):
        pieces.append(piece)
        samples += len(piece)
        if samples >= _SOUND_S * rate_hz:
            yield np.concatenate(pieces)
            pieces, samples = [], 0
    if pieces:
        yield np.concatenate(pieces)


def _video(data: bytes, max_s: float) -> Iterator[tuple[int, float, int, int, bool]]:
    """(frames, frames a second, width, height, has sound), by the headers, or by the number of packets.

    Width and height are as players show them, before the frames are turned.
    """
    from services.common.media.containers import claimed_s, opened, video_track
    from services.common.media.frames import display_size

    with opened(data, "video") as container:
        track = video_track(container)
        refuse_longer("video", claimed_s(container, track, data), max_s)
        total = track.frames or sum(1 for packet in container.demux(track) if packet.size)
        rate = float(track.average_rate or track.guessed_rate or 0)
        if not total or not rate or not track.width:
            raise MediaError("the video has no frames, or no frame rate")
        yield total, rate, *display_size(track), bool(container.streams.audio)


def _frames(data: bytes, width: int, height: int, wanted: list[int]) -> Iterator[np.ndarray]:
    """The frames of these indices, which ascend, (height, width, 3) uint8, or turned. The last frame of the file comes
    once for those that the container promised and lacks."""
    from services.common.media.containers import opened, video_track
    from services.common.media.frames import shown

    with opened(data, "video") as container:
        track = video_track(container)
        track.thread_type = "AUTO"
        last, found = None, 0
        for index, frame in enumerate(container.decode(track)):
            last = frame
            while found < len(wanted) and wanted[found] == index:
                found += 1
                yield shown(frame, (width, height))
            if found == len(wanted):
                return
        if last is not None:
            yield shown(last, (width, height))


def _check(data: bytes, kind: str, max_pixels: int, max_s: float) -> Iterator[Any]:
    """Of a file's header: that it is of `kind`, "image", "audio" or "video", and within the limits."""
    if kind == "image":
        with images.open_image(data, max_pixels):
            return  # the stage decodes it, one of a request at a time
    from services.common.media.containers import claimed_s, opened, sound_track, video_track

    with opened(data, "audio" if kind == "audio" else "video") as container:
        track = sound_track(container) if kind == "audio" else video_track(container)
        if track.type == "video" and track.width * track.height > max_pixels:
            raise MediaError(f"{track.width} x {track.height} pixels are more than the {max_pixels} allowed")
        refuse_longer(kind, claimed_s(container, track, data), max_s)
        if not any(packet.size for packet in container.demux(track)):
            raise MediaError(f"the {kind} has no content: its length is zero")
    yield from ()


CALLS: dict[str, Callable[..., Iterator[Any]]] = {
    "image_size": _image_size,
    "image": _image,
    "mask": _mask,
    "sound_s": _sound_s,
    "sound": _sound,
    "video": _video,
    "frames": _frames,
    "check": _check,
}
