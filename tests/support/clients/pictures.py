"""What tests of pictures over HTTP ask for, send and look at."""

import base64
import io
import struct
import zlib

import numpy as np
from PIL import Image

from tests.support.scripted.dit import picture_of

MODEL = "scripted-dit"
GENERATE, EDIT = "/v1/images/generations", "/v1/images/edits"
ASK = {"prompt": "a boat", "model": MODEL}


def png(seed: int = 0, width: int = 32, height: int = 32) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture_of(seed, width, height)).save(file, "PNG")
    return file.getvalue()


def noise(seed: int) -> bytes:
    """A PNG of 3 MB."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (1000, 1000, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def bomb(side: int = 20_000) -> bytes:
    """A PNG of 50 kB that unpacks to 400 million pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes((side // 8 + 1) * side), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def pixels(b64_json: str, file_format: str = "PNG") -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(b64_json))) as image:
        assert image.format == file_format
        return np.asarray(image.convert("RGB"))


def same(picture: np.ndarray, seed: int, width: int = 64, height: int = 48) -> None:
    np.testing.assert_array_equal(picture, picture_of(seed, width, height))


def said(*content, role: str = "user") -> dict:
    return {"role": role, "content": list(content)}


def shown(file: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file).decode()}"}}


def spoken(text: str) -> dict:
    return {"type": "text", "text": text}
