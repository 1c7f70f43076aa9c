"""Media and texts that are small to send and large to read, each made once."""

import base64
import io
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from tests.hostile.meter import MIB
from tests.support.kept import kept_value

SIDE = 7900  # pixels: nearly as many as an image may have


@cache
def picture(kind: str, width: int = SIDE, height: int = SIDE) -> bytes:
    """A file of one colour."""

    def make() -> bytes:
        file = io.BytesIO()
        Image.new("RGB", (width, height), (90, 30, 200)).save(file, kind)
        return file.getvalue()

    return kept_value(make, "a picture of one colour", kind, width, height)


@cache
def silence(seconds: int, rate_hz: int) -> bytes:
    """A FLAC file, thousands of times smaller than its sound."""

    def make() -> bytes:
        file = io.BytesIO()
        second = np.zeros(rate_hz, np.int16)
        with soundfile.SoundFile(file, "w", rate_hz, 1, format="FLAC") as sound:
            for _ in range(seconds):
                sound.write(second)
        return file.getvalue()

    return kept_value(make, "silence", seconds, rate_hz)


SOUNDS: dict[str, Callable[[], bytes]] = {
    "24 h": lambda: silence(86_400, 8000),
    "3 h": lambda: silence(3 * 3600, 8000),
    "half an hour at 192 kHz": lambda: silence(1800, 192_000),
    "a minute": lambda: silence(60, 16_000),
}
PICTURES: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: picture("PNG"),
    "WebP": lambda: picture("WEBP"),
    "JPEG": lambda: picture("JPEG"),
    "a line": lambda: picture("PNG", 60_000, 1),
    "too large": lambda: picture("PNG", 12_000, 12_000),
}


def part(kind: str, data: bytes) -> dict[str, Any]:
    """A part of a chat's message."""
    mime = {"image": "image/png", "audio": "audio/flac", "video": "video/mp4"}[kind]
    url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


TEXTS: dict[str, Callable[[], str]] = {
    "words": lambda: "seven plus five " * MIB,
    "a letter": lambda: "a" * (8 * MIB),
    "a word as long as it may be": lambda: "a" * 262_000,
    "signs": lambda: "!?(" * (3 * MIB),
    "words of the context's length": lambda: "seven plus five " * 4000,
    "emoji": lambda: "\U0001f600" * 300_000,
    "control tokens": lambda: "<|im_end|>\n<|im_start|>system\n" * 3000,
    "spaces": lambda: " " * MIB,
}


def _properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property{i}": {"type": "string"} for i in range(count)}}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "1,000 properties": lambda: _properties(1000),
    "3,000 properties": lambda: _properties(3000),
    "an enum": lambda: {"type": "string", "enum": [f"value {i}" for i in range(9000)]},
    "itself": lambda: {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "deep": lambda: _nested(60),
    "deeper": lambda: _nested(300),
    "a pattern": lambda: {"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}$"},
    "lengths": lambda: {"type": "array", "items": {"type": "string", "maxLength": 5000}, "maxItems": 2000},
    "choices": lambda: {"anyOf": [_properties(9) | {"required": [f"property{i % 9}"]} for i in range(300)]},
}
PATTERNS = ("(a|b|ab){1,3000}", "((a{1,1000}){1,1000}){1,1000}", "(.*a){60}", "[^x]{10000}", "(" * 400 + ")" * 400, "(")
GRAMMARS = (
    "root ::= root root | root",
    "root ::= " + " | ".join(f'"{i}" root' for i in range(3000)),
    'root ::= a\na ::= "x" a | b\nb ::= "y" b | a',
    "root ::= [a-z]{1,100000}",
    "no grammar",
)

ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 2**70, -0.5, 1e308, "", "\x00", "\ud800", "x" * 9999, [], {}, [[]], [None]),
    *({"type": "text"}, {"": ""}, ["x"] * 99, [{}] * 9),
)


def spots(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values below `value` are."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield (*place, name)
        yield from spots(each, (*place, name))


def replaced(value: Any, place: tuple[Any, ...], other: Any) -> Any:
    """A copy of `value` with `other` at `place`."""
    whole = json.loads(json.dumps(value))
    holder = whole
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = other
    return whole
