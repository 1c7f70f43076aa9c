"""Odd but valid files, made here: gateway, thinker and dit take them, and the model gets what people see and hear."""

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gateway.media.check import check
from gateway.settings import GatewaySettings
from quartet.v1 import dit_pb2, server_info_pb2
from services.common.errors import InvalidInput, InvalidMedia
from services.common.media import MediaError
from services.common.media.calls import Read
from services.diffusion.config import PipelineSettings
from services.diffusion.images import File, decode_files
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import MediaFile
from services.thinker.media import decode_audio, decode_image, decode_video
from tests.support.samples.odd_images import BLOCK, IMAGES, LOSSY, PICTURE, OddImage, chunk, exif, png, saved
from tests.support.samples.odd_sounds import SOUNDS, OddSound, encoded, samples
from tests.support.samples.odd_videos import FRAMES, VIDEOS, OddVideo, with_cover
from tests.support.scripted.preprocessing import decoders

GATEWAY = GatewaySettings(pipeline=Path("unused.yaml"))
THINKER = ThinkerSettings(model="unused")
DIT = PipelineSettings(model="unused")
ASKED = dit_pb2.DitStart(), server_info_pb2.DitInfo()


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Read]:
    """A process that decodes: it gives the same bits."""
    with decoders().lend(lambda: False) as read:
        yield read


def unlike(got: np.ndarray, shown: np.ndarray, tolerance: int, block: int = BLOCK) -> str:
    """How the pixels differ; "" if they do not."""
    if got.shape != shown.shape:
        return f"{got.shape} instead of {shown.shape}"
    off = np.abs(got.astype(int) - shown)
    if tolerance >= LOSSY:
        inner = np.arange(max(off.shape)) % block
        inner = (inner >= block // 4) & (inner < block - block // 4)
        off = off[inner[: len(off)]][:, inner[: off.shape[1]]]
    off = int(off.max())
    return f"{off} levels off" if off > tolerance else ""


def failures(part: Callable[[], Iterable[Any]], fault: Callable[[Any], str]) -> dict[str, str]:
    """By the name of each file of `part` that has one: the fault."""
    found: dict[str, str] = {}
    for each in part():
        try:
            found[each.name] = fault(each)
        except (MediaError, InvalidInput) as refusal:
            found[each.name] = str(refusal)
    assert found
    return {name: fault for name, fault in found.items() if fault}


@pytest.mark.parametrize("part", IMAGES)
def test_images_are_what_viewers_show(part: Callable[[], Iterable[OddImage]], elsewhere: Read) -> None:
    def fault(image: OddImage) -> str:
        check("image", image.data, GATEWAY)
        file = MediaFile("image", image.data, "image")
        seen = decode_image(file, THINKER, elsewhere)
        np.testing.assert_array_equal(seen, decode_image(file, THINKER))
        (made_from,) = decode_files([File("image", "images[0]", image.data)], *ASKED, DIT, elsewhere).images
        assert not made_from.getexif()
        shown = [unlike(np.asarray(each), image.shown, image.tolerance) for each in (seen, made_from)]
        return ", ".join(filter(None, shown))

    assert not failures(part, fault)


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(decode_image(MediaFile("image", data, "image"), THINKER))


@pytest.mark.parametrize("options", [{}, {"restart_marker_blocks": 1}, {"optimize": True}], ids=str)
def test_a_jpeg_that_was_cut_is_refused_unless_all_of_its_picture_is_there(options):
    noise = np.random.default_rng(0).integers(0, 255, PICTURE.shape, dtype=np.uint8)
    data = saved(Image.fromarray(noise), "JPEG", **options)
    whole = decoded(data)
    np.testing.assert_array_equal(decoded(data[:-2]), whole)
    for cut in range(3, 200):
        with pytest.raises(InvalidMedia, match="image: the file is c"):
            decoded(data[:-cut])


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_damaged_exif_is_no_fault_of_the_picture(file_format):
    random = np.random.default_rng(0)
    block = exif(6)
    block[0x010F] = "maker"
    block[0x0131] = "software"
    order = "<" if b"II" in block.tobytes()[:8] else ">"
    # a text as the picture's width: who writes the block anew fails
    wrong = block.tobytes().replace(struct.pack(f"{order}HH", 0x0131, 2), struct.pack(f"{order}HH", 0x0100, 2))
    assert wrong != block.tobytes()
    assert decoded(saved(Image.fromarray(PICTURE), file_format, exif=wrong)).shape == (48, 32, 3)
    for _ in range(300):
        damaged = bytearray(block.tobytes())
        for place in random.integers(6, len(damaged), 3):
            damaged[place] = random.integers(256)
        data = saved(Image.fromarray(PICTURE), file_format, exif=bytes(damaged))
        check("image", data, GATEWAY)
        assert sorted(decoded(data).shape) == [3, 32, 48]


CUT = png(PICTURE.reshape(32, -1), (48, 32), 8, 2)[:99]  # its header is whole, which is all that the gateway reads


@pytest.mark.parametrize("data", [b"nonsense", CUT, b"BM", b"\xff\xd8\xff"])
def test_a_broken_image_is_refused_in_words_for_people(data):
    reason = "the file is corrupt or cut off, or is no image of these formats: PNG, JPEG, WEBP, GIF, BMP"
    for decode in (
        lambda: decode_image(MediaFile("image", data, "messages[0].content[1]"), THINKER),
        lambda: decode_files([File("image", "messages[0].content[1]", data)], *ASKED, DIT),
    ):
        with pytest.raises(InvalidMedia) as caught:
            decode()
        assert str(caught.value) == f"messages[0].content[1]: {reason}"
    if data is not CUT:
        with pytest.raises(MediaError) as refused:
            check("image", data, GATEWAY)
        assert str(refused.value) == reason


def test_an_image_with_more_pixels_than_pillow_takes_is_called_too_large():
    head = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    with pytest.raises(MediaError, match="more pixels than the 64000000 allowed"):
        check("image", data, GATEWAY)


def unheard(got: np.ndarray, sound: OddSound) -> str:
    """How the samples differ from what is played; "" if they do not. Lossy codecs may delay a sound, and add to it."""
    more_s = len(got) / 16_000 - len(sound.played) / 16_000
    if not -0.001 - sound.slack_s <= more_s <= 0.001 + sound.slack_s:
        return f"{more_s:.3f} s too long"
    if sound.slack_s:
        spectra = (np.abs(np.fft.rfft(samples, 1 << 17)) for samples in (got, sound.played))
        one, other = (spectrum / np.linalg.norm(spectrum) for spectrum in spectra)
        off = 1 - float(one @ other)
    else:
        got = got[: len(sound.played)]
        off = float(np.square(got - sound.played[: len(got)]).sum() / np.square(sound.played).sum())
    return f"{off:.1e} of its power off" if off > max(sound.tolerance, 1e-8) else ""


@pytest.mark.parametrize("part", SOUNDS)
def test_sounds_are_what_players_play(part: Callable[[], Iterable[OddSound]], elsewhere: Read) -> None:
    def fault(sound: OddSound) -> str:
        check("audio", sound.data, GATEWAY)
        file = MediaFile("audio", sound.data, "sound")
        heard = decode_audio(file, 16_000, THINKER, read=elsewhere)
        np.testing.assert_array_equal(heard, decode_audio(file, 16_000, THINKER))
        return unheard(heard, sound)

    assert not failures(part, fault)


@pytest.mark.parametrize("part", VIDEOS)
def test_videos_are_what_players_show(part: Callable[[], Iterable[OddVideo]], elsewhere: Read) -> None:
    def fault(video: OddVideo) -> str:
        check("video", video.data, GATEWAY)
        video_of = partial(
            decode_video, MediaFile("video", video.data, "video"), 16_000, lambda total, _: np.arange(total), THINKER
        )
        seen, here = video_of(read=elsewhere), video_of()
        np.testing.assert_array_equal(seen.frames, here.frames)
        np.testing.assert_array_equal(seen.sound, here.sound)  # pyright: ignore[reportArgumentType]  None, too
        assert len(seen.frames) >= FRAMES
        shown = {unlike(frame, video.shown, video.tolerance, 2 * BLOCK) for frame in seen.frames}
        return ", ".join(filter(None, shown))

    assert not failures(part, fault)


def test_a_cover_is_no_video():
    with pytest.raises(MediaError, match="the file has no video track"):
        check("video", with_cover(None), GATEWAY)


def test_sound_of_which_much_is_lost_is_refused():
    sound = samples(44_100, 1)
    data = bytearray(encoded(sound, 44_100, "libmp3lame", "mp3"))
    heads = [at for at in range(len(data) - 1) if data[at] == 0xFF and data[at + 1] == 0xFB]
    for at in heads[4::3]:
        data[at + 4 : at + 36] = b"\xff" * 32  # side information: the frame is found, and not decoded
    with pytest.raises(InvalidMedia, match="the sound is damaged"):
        decode_audio(MediaFile("audio", bytes(data), "sound"), 16_000, THINKER)
    ogg = encoded(sound[:4410], 44_100, "flac", "ogg")
    with pytest.raises(InvalidMedia, match="joined of 1001 files"):
        decode_audio(MediaFile("audio", ogg * 1001, "sound"), 16_000, THINKER)
