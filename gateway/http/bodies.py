"""The bodies of requests that are in memory, and what the requests read of a store, bounded in sum."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import ApiError

FREE_BYTES = 256 * 1024  # of each request
_TRY_AGAIN_S = 5.0


def no_room() -> ApiError:
    message = "this server holds as many large requests as it can at the moment; try again, or send a smaller one"
    return ApiError(503, message, None, "too_many_large_bodies", retry_after_s=_TRY_AGAIN_S)


class Body:
    """One of them.

    Attributes:
        owner: the API key's name; without keys the client's address.
        arrives: its end has not come.
        gives_way: it must be dropped.
    """

    def __init__(self, bodies: "Bodies", owner: str) -> None:
        self.owner, self.arrives, self.gives_way = owner, True, asyncio.Event()
        self._bodies, self._held_bytes = bodies, 0

    @property
    def size(self) -> int:
        """Bytes beyond the first FREE_BYTES."""
        return max(0, self._held_bytes - FREE_BYTES)

    def hold(self, size: int) -> None:
        """Counts `size` bytes more. Raises ApiError: 503, there is no room."""
        self._held_bytes += size
        if self._held_bytes > FREE_BYTES and size:
            self._bodies.make_room(self)


class Bodies:
    """All of them together have `most` bytes, apart from the first FREE_BYTES of each. Where there is no room, the
    owner that has most gives way, with a body that still arrives."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._large = set[Body]()

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(body.size for body in self._large)

    @contextmanager
    def request(self, owner: str) -> Iterator[Body]:
        """The body of a request, until the context ends."""
        body = Body(self, owner)
        try:
            yield body
        finally:
            self._large.discard(body)

    def make_room(self, body: Body) -> None:
        """Raises ApiError: 503, there is none for what `body` has become."""
        self._large.add(body)
        while self.size > self._most:
            of_owner = Counter[str]()
            for each in self._large:
                of_owner[each.owner] += each.size
            others = [each for each in self._large if each.arrives and of_owner[each.owner] > of_owner[body.owner]]
            if not others:
                raise no_room()
            largest = max(others, key=lambda each: (of_owner[each.owner], each.size))
            largest.gives_way.set()
            self._large.discard(largest)
