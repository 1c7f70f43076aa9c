"""Pairs the UCX messages that come for one stream with those who wait for them, in either order."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

TAG_BITS = 24
"""Lower bits of a tag: the producer's number of a message within its stream. The other bits name the stream."""

MOST_KEPT = 1024
"""Most messages kept before they are asked for: as many as a consumer may grant credit for at once."""


@dataclass(frozen=True)
class Wanted:
    """A message of `size_bytes` that somebody waits for."""

    size_bytes: int
    future: Future[np.ndarray]


class Arrivals:
    """The messages and waiters of one stream. For the UCX worker's thread only."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self._wanted: dict[int, Wanted] = {}

    def want(self, tag: int, wanted: Wanted) -> Any | None:
        """The message of `tag`; None if it has yet to come: then `due` has `wanted` for it."""
        message = self._kept.pop(tag, None)
        if message is None:
            self._wanted[tag] = wanted
        return message

    def due(self, tag: int) -> Wanted | None:
        """Who waits for the message of `tag`, which has come."""
        return self._wanted.pop(tag, None)

    def keep(self, tag: int, message: Any) -> bool:
        """Keeps a message that nobody has asked for yet. False if it is one too many, or the second of its tag."""
        if tag in self._kept or len(self._kept) >= MOST_KEPT:
            return False
        self._kept[tag] = message
        return True

    def end(self) -> tuple[list[Any], list[Wanted]]:
        """(messages that nobody will ask for, those who wait in vain)."""
        kept, wanted = list(self._kept.values()), list(self._wanted.values())
        self._kept.clear()
        self._wanted.clear()
        return kept, wanted
