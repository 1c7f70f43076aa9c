"""How much a client's JSON may hold, counted before it is parsed: an object of Python takes 50 times its text."""

import json
from typing import Any

import numpy as np

from gateway.errors import ApiError

MAX_VALUES = 400_000  # objects, lists, and commas between values
MAX_MEMBERS = 32_768  # of all objects together
MAX_OBJECT_MEMBERS = 2_048  # pydantic makes an error of each that it does not know
_SMALL = MAX_OBJECT_MEMBERS * len('"":0,')  # shorter texts cannot have so many members
_PIECE = 1024 * 1024
_QUOTE = ord('"')


def check_json(text: bytes | bytearray | str) -> None:
    """Takes time and memory of the text's length, whatever it holds. Raises ApiError: 400, it holds too much."""
    if len(text) <= _SMALL:
        return
    values, members = _counts(text)
    if values > MAX_VALUES or members > MAX_OBJECT_MEMBERS:  # but texts have such characters, too
        values, members = _counts_outside_strings(text.encode(errors="replace") if isinstance(text, str) else text)
    if values > MAX_VALUES:
        raise _too_many(f"more than {MAX_VALUES} values")
    if members > MAX_MEMBERS:
        raise _too_many(f"more than {MAX_MEMBERS} members in all its objects")
    if members > MAX_OBJECT_MEMBERS:
        _check_objects(text)


def _too_many(what: str) -> ApiError:
    return ApiError(
        400, f"the JSON has {what}, the most that is read: send less in one message", None, "json_too_large"
    )


def _counts(text: bytes | bytearray | str) -> tuple[int, int]:
    """(values, members) at most: characters that come with them."""
    if isinstance(text, str):
        return text.count(",") + text.count("[") + text.count("{"), text.count(":")
    return text.count(b",") + text.count(b"[") + text.count(b"{"), text.count(b":")


def _counts_outside_strings(text: bytes | bytearray) -> tuple[int, int]:
    """(values, members). Stops where there are too many values. numpy lets other threads run meanwhile."""
    values = members = inside = 0
    rest = b""
    for start in range(0, len(text), _PIECE):
        piece = (rest + text[start : start + _PIECE]).replace(b"\\\\", b"__")
        rest = b"\\" if piece.endswith(b"\\") else b""
        codes = np.frombuffer(piece.removesuffix(b"\\").replace(b'\\"', b"__"), np.uint8)
        quotes = np.cumsum(codes == _QUOTE, dtype=np.uint8)  # only whether it is odd matters
        more_values, more_members = _counts(codes[(quotes + np.uint8(inside)) & 1 == 0].tobytes())
        values, members = values + more_values, members + more_members
        inside = (inside + int(quotes[-1])) & 1 if len(quotes) else inside
        if values > MAX_VALUES:
            break
    return values, members


def _check_objects(text: bytes | bytearray | str) -> None:
    """Raises ApiError: 400, an object has too many members."""

    def check(members: list[tuple[str, Any]]) -> None:
        if len(members) > MAX_OBJECT_MEMBERS:
            raise _too_many(f"an object with more than {MAX_OBJECT_MEMBERS} members")

    try:
        json.loads(text, object_pairs_hook=check)
    except (ValueError, RecursionError):
        return  # not JSON: who reads it says where
