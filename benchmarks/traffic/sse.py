"""Server-sent events, as the gateway sends them."""

import json
from collections.abc import Iterable, Iterator
from typing import Any


def events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any] | None]]:
    """Of each event, when its last byte came and what it holds; None is [DONE], after which nothing comes.

    Args:
        pieces: of the body, each with its moment.
    """
    rest = b""
    for came_s, piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: "):
                data = event.removeprefix(b"data: ")
                yield came_s, None if data == b"[DONE]" else json.loads(data)
