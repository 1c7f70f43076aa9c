"""Odd but valid images, and what viewers show of each: the picture is drawn here, so its pixels are known."""

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

BLOCK = 16  # JPEG's blocks of colour, at half the resolution
COLOURS = np.array(
    [[(200, 30, 30), (30, 160, 60), (40, 60, 220)], [(240, 220, 40), (10, 10, 10), (128, 128, 128)]], np.uint8
)
PICTURE = COLOURS.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)
"""(32, 48, 3): six blocks, so that no turn or flip of it is the same picture."""

LOSSY = 12
"""Levels that a lossy codec may be off within a block; at its edges it mixes colours."""


@dataclass(frozen=True)
class OddImage:
    """`shown` is (height, width, 3); each value may be `tolerance` levels off."""

    name: str
    data: bytes
    shown: np.ndarray
    tolerance: int = 0


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(
    rows: np.ndarray, size: tuple[int, int], depth: int, colour: int, *chunks: bytes, interlaced: bool = False
) -> bytes:
    """A PNG of (height, bytes) `rows`, written by hand: Pillow writes not all kinds."""
    width, height = size
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, int(interlaced))
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    return b"".join(
        [b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", head), *chunks, chunk(b"IDAT", zlib.compress(raw)), chunk(b"IEND", b"")]
    )


def on_white(pixels: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """`pixels` (h, w, 3) of `alpha` (h, w) in 0 to 1."""
    return np.rint(pixels * alpha[..., None] + 255.0 * (1 - alpha[..., None])).astype(np.uint8)


def packed(values: np.ndarray, depth: int) -> np.ndarray:
    """Rows of `values` (h, w) with `depth` bits each, big-endian."""
    if depth == 16:
        return values.astype(">u2").view(np.uint8)
    bits = np.unpackbits(values.astype(np.uint8)[..., None], axis=2)[..., 8 - depth :]
    return np.packbits(bits.reshape(len(values), -1), axis=1)


def of_grey() -> Iterator[OddImage]:
    """Each depth, without and with a transparent value."""
    for depth in (1, 2, 4, 8, 16):
        most = 2**depth - 1
        values = (np.arange(32)[None] * 7 + np.arange(8)[:, None] * 5) * (most // 17 + 1) % (most + 1)
        shown = np.stack([values >> 8 if depth == 16 else values * (255 // most)] * 3, axis=2).astype(np.uint8)
        yield OddImage(f"grey of {depth} bits", png(packed(values, depth), (32, 8), depth, 0), shown)
        clear = int(values[0, 2])
        data = png(packed(values, depth), (32, 8), depth, 0, chunk(b"tRNS", struct.pack(">H", clear)))
        yield OddImage(f"grey of {depth} bits, one clear", data, on_white(shown, (values != clear).astype(float)))


def of_colour() -> Iterator[OddImage]:
    """Depths, transparent colours, palettes, alpha channels."""
    height, width = PICTURE.shape[:2]
    size = (width, height)
    deep = PICTURE.astype(np.uint16) * 257 - (PICTURE > 128) * np.uint16(80)  # the low byte is not the high one
    is_clear = (COLOURS[0, 1] == PICTURE).all(axis=2)
    holed = on_white(PICTURE, 1.0 - is_clear)
    for depth, pixels in ((8, PICTURE), (16, deep)):
        rows = packed(pixels.reshape(height, -1), depth)
        shown = PICTURE if depth == 8 else (deep >> 8).astype(np.uint8)
        clear = chunk(b"tRNS", struct.pack(">HHH", *map(int, pixels[0, BLOCK])))
        yield OddImage(f"colours of {depth} bits", png(rows, size, depth, 2), shown)
        yield OddImage(
            f"colours of {depth} bits, one clear", png(rows, size, depth, 2, clear), on_white(shown, 1.0 - is_clear)
        )
        alpha = np.linspace(0, 255, width).astype(np.uint8)[None].repeat(height, axis=0)
        full = alpha.astype(np.uint16) * 257 if depth == 16 else alpha
        for colour, channels, name in ((6, pixels, "colours"), (4, pixels[..., :1], "grey")):
            rows = packed(np.concatenate([channels, full[..., None]], axis=2).reshape(height, -1), depth)
            seen = on_white(shown if colour == 6 else shown[..., :1].repeat(3, axis=2), alpha / 255)
            yield OddImage(f"{name} of {depth} bits with alpha", png(rows, size, depth, colour), seen, 1)
    palette = COLOURS.reshape(-1, 3)
    index = np.arange(6).reshape(2, 3).repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)
    table = chunk(b"PLTE", palette.tobytes())
    for depth in (4, 8):
        rows = packed(index, depth)
        yield OddImage(f"palette of {depth} bits", png(rows, size, depth, 3, table), PICTURE)
        clear = png(rows, size, depth, 3, table, chunk(b"tRNS", b"\xff\0"))
        yield OddImage(f"palette of {depth} bits, one clear", clear, holed)
    half = png(packed(index, 8), size, 8, 3, table, chunk(b"tRNS", b"\x80" * 6))
    yield OddImage("palette, all half clear", half, on_white(PICTURE, np.full((height, width), 128 / 255)), 1)


def of_damaged_png() -> Iterator[OddImage]:
    """Damaged where nothing of the picture is."""
    height, width = PICTURE.shape[:2]
    rows = PICTURE.reshape(height, -1)
    whole = png(rows, (width, height), 8, 2)
    yield OddImage("PNG without its end", whole[:-12], PICTURE)
    yield OddImage("PNG with a wrong checksum at its end", whole[:-1] + b"\0", PICTURE)
    yield OddImage("PNG with data after its end", whole + bytes(100), PICTURE)
    for name, extra in {
        "a broken colour profile": chunk(b"iCCP", b"x\0\0nonsense"),
        "broken EXIF": chunk(b"eXIf", b"MM\0\x2a\xff\xff\xff\xff"),
        "an unknown chunk": chunk(b"zzZz", b"nonsense"),
        "a comment in Latin-1": chunk(b"tEXt", b"Comment\0caf\xe9"),
    }.items():
        yield OddImage(f"PNG with {name}", png(rows, (width, height), 8, 2, extra), PICTURE)


def saved(image: Image.Image, file_format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def exif(orientation: int) -> Image.Exif:
    block = Image.Exif()
    block[0x0112] = orientation
    return block


def turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """What EXIF's table of orientations says: where the file's first row and first column are shown."""
    if orientation > 4:
        pixels = pixels.swapaxes(0, 1)
    rows_from_below, columns_from_right = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return pixels[:: -1 if rows_from_below else 1, :: -1 if columns_from_right else 1]


def of_orientations() -> Iterator[OddImage]:
    image = Image.fromarray(PICTURE)
    for orientation in range(1, 9):
        data = saved(image, "JPEG", quality=95, exif=exif(orientation))
        yield OddImage(f"JPEG of orientation {orientation}", data, turned(PICTURE, orientation), LOSSY)
    for file_format, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        data = saved(image, file_format, exif=exif(6), **options)
        yield OddImage(f"{file_format} of orientation 6", data, turned(PICTURE, 6))
    clear = Image.fromarray(np.dstack([PICTURE, np.full(PICTURE.shape[:2], 0, np.uint8)]))
    data = saved(clear, "PNG", exif=exif(8))
    yield OddImage("clear PNG of orientation 8", data, np.full((48, 32, 3), 255, np.uint8))
    yield OddImage("JPEG of orientation 77", saved(image, "JPEG", quality=95, exif=exif(77)), PICTURE, LOSSY)


def of_jpeg() -> Iterator[OddImage]:
    image = Image.fromarray(PICTURE)
    grey = np.asarray(image.convert("L").convert("RGB"))
    for name, options in {
        "baseline": {},
        "whole chroma": {"subsampling": 0},
        "progressive": {"progressive": True},
        "with restart marks": {"restart_marker_blocks": 1},
        "with a density of 2:1": {"dpi": (144, 72)},
        "with a broken colour profile": {"icc_profile": b"nonsense"},
        "with broken EXIF": {"exif": b"Exif\0\0MM\0\x2a\xff\xff\xff\xff"},
        "with cut EXIF": {"exif": exif(1).tobytes()[:-9]},
    }.items():
        yield OddImage(f"JPEG {name}", saved(image, "JPEG", quality=95, **options), PICTURE, LOSSY)
    yield OddImage("JPEG in grey", saved(image.convert("L"), "JPEG", quality=95), grey, LOSSY)
    yield OddImage("JPEG for print", saved(image.convert("CMYK"), "JPEG", quality=98, subsampling=0), PICTURE, LOSSY)
    odd = struct.pack(">HHI4s", 0x0100, 2, 3, b"60") + struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)  # a text for a width
    block = b"Exif\0\0MM\0\x2a" + struct.pack(">IH", 8, 2) + odd + bytes(4)
    data = saved(image, "JPEG", quality=95, exif=block)
    yield OddImage("JPEG with a text for a number in EXIF", data, turned(PICTURE, 6), LOSSY)
    for name, options in {"baseline": {}, "progressive": {"progressive": True}, "turned": {"exif": exif(6)}}.items():
        data = saved(image, "JPEG", quality=95, **options)
        shown = turned(PICTURE, 6) if name == "turned" else PICTURE
        yield OddImage(f"JPEG without its end, {name}", data[:-2], shown, LOSSY)
        yield OddImage(f"JPEG with half its end, {name}", data[:-1], shown, LOSSY)
    data = saved(image, "JPEG", quality=95)
    yield OddImage("JPEG with data after its end", data + bytes(100), PICTURE, LOSSY)
    second = Image.new("RGB", image.size, "white")
    yield OddImage("two JPEGs in one", saved(image, "MPO", save_all=True, append_images=[second]), PICTURE, LOSSY)


def bmp(bits: int, rows: bytes, height: int, compression: int = 0, masks: bytes = b"", palette: bytes = b"") -> bytes:
    width = PICTURE.shape[1]
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(rows), 0, 0, len(palette) // 4, 0)
    offset = 14 + len(info) + len(masks) + len(palette)
    return struct.pack("<2sIHHI", b"BM", offset + len(rows), 0, 0, offset) + info + masks + palette + rows


def of_others() -> Iterator[OddImage]:
    image, height = Image.fromarray(PICTURE), PICTURE.shape[0]
    blue_first = PICTURE[..., ::-1]
    index = np.arange(6).reshape(2, 3).repeat(BLOCK, axis=0).repeat(BLOCK, axis=1).astype(np.uint8)
    palette = b"".join(bytes(colour[::-1]) + b"\0" for colour in COLOURS.reshape(-1, 3))
    yield OddImage("BMP from below", bmp(24, blue_first[::-1].tobytes(), height), PICTURE)
    yield OddImage("BMP from above", bmp(24, blue_first.tobytes(), -height), PICTURE)
    padded = np.dstack([blue_first, np.zeros(PICTURE.shape[:2], np.uint8)])  # as Windows' screenshots have it
    yield OddImage("BMP of 32 bits without alpha", bmp(32, padded[::-1].tobytes(), height), PICTURE)
    yield OddImage("BMP of 8 bits", bmp(8, index[::-1].tobytes(), height, palette=palette), PICTURE)
    yield OddImage("BMP of 4 bits", bmp(4, packed(index[::-1], 4).tobytes(), height, palette=palette), PICTURE)
    red, green, blue = (PICTURE[..., i].astype(np.uint16) for i in range(3))
    short = ((red >> 3 << 11) | (green >> 2 << 5) | (blue >> 3))[::-1]
    masks = struct.pack("<III", 0xF800, 0x07E0, 0x001F)
    yield OddImage("BMP of 16 bits", bmp(16, short.astype("<u2").tobytes(), height, 3, masks), PICTURE, 8)
    runs = b"".join(
        b"".join(bytes((BLOCK, int(row[i]))) for i in (0, BLOCK, 2 * BLOCK)) + b"\0\0" for row in index[::-1]
    )
    yield OddImage("BMP in runs", bmp(8, runs + b"\0\1", height, 1, palette=palette), PICTURE)
    clear_gif = Image.frombytes("P", image.size, index.tobytes())
    clear_gif.putpalette(COLOURS.tobytes())
    hole = Image.fromarray(np.dstack([PICTURE, np.where(index == 1, 0, 255).astype(np.uint8)]))
    holed = on_white(PICTURE, (index != 1).astype(float))
    second = Image.new("RGB", image.size, "white")
    yield OddImage("GIF", saved(image.quantize(8), "GIF"), PICTURE)
    yield OddImage("clear GIF", saved(clear_gif, "GIF", transparency=1), holed)
    yield OddImage("moving GIF", saved(image.quantize(8), "GIF", save_all=True, append_images=[second]), PICTURE)
    yield OddImage("GIF without its end", saved(image.quantize(8), "GIF")[:-1], PICTURE)
    yield OddImage("WebP", saved(image, "WEBP", quality=95), PICTURE, LOSSY)
    yield OddImage("clear WebP", saved(hole, "WEBP", lossless=True), holed)
    options = {"save_all": True, "append_images": [second], "lossless": True}
    yield OddImage("moving WebP", saved(image, "WEBP", **options), PICTURE)
    yield OddImage("moving PNG", saved(image, "PNG", save_all=True, append_images=[second]), PICTURE)


IMAGES = (of_grey, of_colour, of_damaged_png, of_orientations, of_jpeg, of_others)
