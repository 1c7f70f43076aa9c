"""Odd but valid videos, and what players show of each: the picture is drawn here, so its pixels are known."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import av
import numpy as np
from av.container import OutputContainer
from av.stream import Disposition
from PIL import Image

from tests.support.samples.odd_images import LOSSY, PICTURE, on_white, saved

FRAMES = 8
UNIT = 1 << 16  # 1 in a display matrix
SIDE = PICTURE.repeat(2, axis=0).repeat(2, axis=1)
"""(64, 96, 3): six blocks of 32 pixels."""


@dataclass(frozen=True)
class OddVideo:
    """Each frame is `shown` (height, width, 3); each value may be `tolerance` levels off, near edges more."""

    name: str
    data: bytes
    shown: np.ndarray
    tolerance: int = LOSSY


def encoded(
    codec: str = "mpeg4",
    file_format: str = "mp4",
    pixel_format: str = "yuv420p",
    picture: np.ndarray = SIDE,
    matrix: Sequence[int] | None = None,
    aspect: Fraction | None = None,
) -> bytes:
    """A file of FRAMES times `picture`, (h, w, 3) or (h, w, 4)."""
    file = io.BytesIO()
    with av.open(file, "w", format=file_format) as container:
        container.mux(_packets(_track(container, codec, pixel_format, picture, matrix, aspect), picture))
    return file.getvalue()


def _track(
    container: OutputContainer,
    codec: str,
    pixel_format: str,
    picture: np.ndarray,
    matrix: Sequence[int] | None = None,
    aspect: Fraction | None = None,
) -> av.VideoStream:
    track = cast("av.VideoStream", container.add_stream(codec, rate=8))
    track.height, track.width = picture.shape[:2]
    track.pix_fmt = pixel_format
    track.codec_context.bit_rate = 4_000_000
    if aspect:
        track.codec_context.sample_aspect_ratio = aspect
    if matrix:
        track.set_display_matrix(matrix)
    return track


def _packets(track: av.VideoStream, picture: np.ndarray) -> list[av.Packet]:
    packets: list[av.Packet] = []
    for i in range(FRAMES):
        frame = av.VideoFrame.from_ndarray(picture, format="rgba" if picture.shape[2] == 4 else "rgb24")
        frame.pts, frame.time_base = i, Fraction(1, 8)
        packets += track.encode(frame)
    return [*packets, *track.encode()]


def placed(picture: np.ndarray, right: tuple[int, int], down: tuple[int, int]) -> np.ndarray:
    """`picture`, pixel by pixel, where its steps to the right and down are those on the screen, each as (x, y)."""
    height, width = picture.shape[:2]
    xs, ys = np.meshgrid(np.arange(width), np.arange(height))
    at_x, at_y = xs * right[0] + ys * down[0], xs * right[1] + ys * down[1]
    at_x, at_y = at_x - at_x.min(), at_y - at_y.min()
    screen = np.zeros((at_y.max() + 1, at_x.max() + 1, 3), np.uint8)
    screen[at_y, at_x] = picture
    return screen


def of_matrices() -> Iterator[OddVideo]:
    """The eight ways to lay a picture on the screen, and one that is not quite upright."""
    for a, b, c, d in (
        (1, 0, 0, 1),
        (-1, 0, 0, 1),
        (1, 0, 0, -1),
        (-1, 0, 0, -1),
        (0, 1, 1, 0),
        (0, -1, 1, 0),
        (0, 1, -1, 0),
        (0, -1, -1, 0),
    ):
        matrix = [a * UNIT, b * UNIT, 0, c * UNIT, d * UNIT, 0, 0, 0, 1 << 30]
        shown = placed(SIDE, (a, b), (c, d))
        for codec, file_format in (("mpeg4", "mp4"), ("libx264", "mov")):
            data = encoded(codec, file_format, matrix=matrix)
            yield OddVideo(f"{codec} laid ({a} {b}, {c} {d})", data, shown)
    leaning = [round(0.999 * UNIT), round(0.04 * UNIT), 0, round(-0.04 * UNIT), round(0.999 * UNIT), 0, 0, 0, 1 << 30]
    yield OddVideo("a leaning video", encoded(matrix=leaning), SIDE)


def of_aspects() -> Iterator[OddVideo]:
    """Pixels that are not square; with a matrix they are stretched before they are turned."""
    quarter = [0, UNIT, 0, -UNIT, 0, 0, 0, 0, 1 << 30]
    for codec, file_format in (("mpeg4", "mp4"), ("libx264", "matroska")):
        wide = encoded(codec, file_format, aspect=Fraction(2, 1))
        yield OddVideo(f"{codec} with pixels of 2:1", wide, SIDE.repeat(2, axis=1))
        high = encoded(codec, file_format, aspect=Fraction(1, 2))
        yield OddVideo(f"{codec} with pixels of 1:2", high, SIDE.repeat(2, axis=0))
    turned = encoded(matrix=quarter, aspect=Fraction(2, 1))
    yield OddVideo("turned, with pixels of 2:1", turned, placed(SIDE.repeat(2, axis=1), (0, 1), (-1, 0)))


def of_pixels() -> Iterator[OddVideo]:
    alpha = np.zeros(SIDE.shape[:2], np.uint8)
    alpha[:32] = 255  # the upper blocks are seen, the lower ones clear
    holed = on_white(SIDE, alpha / 255)
    clear = np.dstack([SIDE, alpha])
    yield OddVideo("animation with alpha", encoded("qtrle", "mov", "argb", clear), holed, 0)
    yield OddVideo("PNGs with alpha", encoded("png", "mov", "rgba", clear), holed, 0)
    yield OddVideo("animation without alpha", encoded("qtrle", "mov", "rgb24"), SIDE, 0)
    yield OddVideo("colours of 10 bits", encoded("ffv1", "matroska", "yuv444p10le"), SIDE, 2)
    yield OddVideo("grey of 16 bits", encoded("ffv1", "matroska", "gray16le"), _grey(), 4)
    yield OddVideo("colours without loss", encoded("ffv1", "matroska", "bgr0"), SIDE, 0)
    yield OddVideo("JPEGs in AVI", encoded("mjpeg", "avi", "yuvj420p"), SIDE)
    for codec, file_format in (
        ("libx264", "mpegts"),
        ("libvpx", "webm"),
        ("libvpx-vp9", "webm"),
        ("mpeg2video", "mpeg"),
    ):
        yield OddVideo(f"{codec} in {file_format}", encoded(codec, file_format), SIDE)
    index = Image.fromarray(SIDE).quantize(8)
    other = index.copy()
    other.paste(index.crop((50, 50, 51, 51)), (0, 0))  # Pillow writes no frame twice
    frames = [other, index] * (FRAMES // 2)
    yield OddVideo("GIF", saved(index, "GIF", save_all=True, append_images=frames, duration=125), SIDE)
    clear_gif = saved(
        index, "GIF", save_all=True, append_images=frames, duration=125, transparency=index.getpixel((50, 10))
    )
    yield OddVideo("clear GIF", clear_gif, on_white(SIDE, (SIDE[10, 50] != SIDE).any(axis=2).astype(float)))


def _grey() -> np.ndarray:
    grey = av.VideoFrame.from_ndarray(SIDE, format="rgb24").to_ndarray(format="gray")
    return grey[..., None].repeat(3, axis=2)


def of_tracks() -> Iterator[OddVideo]:
    """A cover or an unknown track beside the video, and a size that changes part-way."""
    white = np.full((16, 32, 3), 255, np.uint8)
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as container:
        pictures = (white, SIDE)
        tracks = [
            _track(container, codec, "rgb24", each) for codec, each in zip(("qtrle", "png"), pictures, strict=True)
        ]
        for track, picture in zip(tracks, pictures, strict=True):
            container.mux(_packets(track, picture))
    yield OddVideo("an unknown track before", file.getvalue().replace(b"rle ", b"zzzz"), SIDE, 0)
    yield OddVideo("a cover beside", with_cover(SIDE), SIDE)
    small = SIDE[::2, ::2]
    joined = encoded("mpeg2video", "mpegts") + encoded("mpeg2video", "mpegts", picture=small)
    yield OddVideo("joined of two sizes", joined, SIDE)


def with_cover(picture: np.ndarray | None) -> bytes:
    """An MP4 with a white cover and, unless it is None, a video of `picture`."""
    file, white = io.BytesIO(), np.full((16, 32, 3), 255, np.uint8)
    with av.open(file, "w", format="mp4") as container:
        cover = _track(container, "mjpeg", "yuvj420p", white)
        cover.disposition = Disposition.attached_pic
        track = None if picture is None else _track(container, "mpeg4", "yuv420p", picture)
        container.mux(_packets(cover, white)[:1])
        if track and picture is not None:
            container.mux(_packets(track, picture))
    return file.getvalue()


VIDEOS = (of_matrices, of_aspects, of_pixels, of_tracks)
