"""Odd but valid files, made here: gateway, thinker and dit take them, and the model gets what people see and hear."""

import struct

import numpy as np
import pytest
from PIL import Image

from gateway.media.check import check
from gateway.settings import GatewaySettings
from services.common.errors import InvalidMedia
from services.common.media import MediaError
from services.diffusion.config import PipelineSettings
from services.diffusion.images import decode_files
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import MediaFile
from services.thinker.media import decode_image
from tests.support.samples.odd_images import BLOCK, LOSSY, PICTURE, chunk, exif, odd_images, png, saved

GATEWAY = GatewaySettings(pipeline="unused.yaml")
THINKER = ThinkerSettings(model="unused")
DIT = PipelineSettings(model="unused")


def unlike(got: np.ndarray, shown: np.ndarray, tolerance: int) -> str:
    """How the pixels differ; "" if they do not."""
    if got.shape != shown.shape:
        return f"{got.shape} instead of {shown.shape}"
    off = np.abs(got.astype(int) - shown)
    if tolerance >= LOSSY:
        inner = np.arange(max(off.shape)) % BLOCK
        inner = (inner >= 4) & (inner < BLOCK - 4)
        off = off[inner[: len(off)]][:, inner[: off.shape[1]]]
    off = int(off.max())
    return f"{off} levels off" if off > tolerance else ""


@pytest.mark.parametrize("image", odd_images(), ids=lambda image: image.name)
def test_an_image_is_what_viewers_show(image):
    check("image", image.data, GATEWAY)
    seen = decode_image(MediaFile("image", image.data, "image"), THINKER)
    (made_from,), _ = decode_files([("images[0]", image.data)], DIT)
    for decoded in (seen, made_from):
        assert decoded.mode == "RGB"
        assert not decoded.getexif()
        assert not unlike(np.asarray(decoded), image.shown, image.tolerance)


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


def test_damaged_exif_is_no_fault_of_the_picture():
    random = np.random.default_rng(0)
    block = exif(6)
    block[0x010F] = "maker"
    for _ in range(300):
        damaged = bytearray(block.tobytes())
        for place in random.integers(6, len(damaged), 3):
            damaged[place] = random.integers(256)
        data = saved(Image.fromarray(PICTURE), "JPEG", exif=bytes(damaged))
        check("image", data, GATEWAY)
        assert sorted(decoded(data).shape) == [3, 32, 48]


@pytest.mark.parametrize(
    "data", [b"nonsense", png(PICTURE.reshape(32, -1), (48, 32), 8, 2)[:99], b"BM", b"\xff\xd8\xff"]
)
def test_a_broken_image_is_refused_in_words_for_people(data):
    with pytest.raises(MediaError) as refused:
        check("image", data, GATEWAY)
    for decode in (
        lambda: decode_image(MediaFile("image", data, "messages[0].content[1]"), THINKER),
        lambda: decode_files([("messages[0].content[1]", data)], DIT),
    ):
        with pytest.raises(InvalidMedia) as caught:
            decode()
        assert str(caught.value) == f"messages[0].content[1]: {refused.value}"
    assert str(refused.value) == (
        "the file is corrupt or cut off, or is no image of these formats: PNG, JPEG, WEBP, GIF, BMP"
    )


def test_an_image_with_more_pixels_than_pillow_takes_is_called_too_large():
    head = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    with pytest.raises(MediaError, match="more pixels than the 64000000 allowed"):
        check("image", data, GATEWAY)
