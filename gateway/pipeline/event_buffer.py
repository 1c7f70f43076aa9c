"""Events waiting for a slow client."""

import asyncio
from collections import deque
from collections.abc import Callable

from gateway.pipeline.events import AudioDelta, Event, TextDelta
from quartet.v1 import thinker_pb2

# Events that may wait for a slow client. Beyond, the stages' streams are not read, which slows the stages.
_MAX_WAITING = 64
# Text that waits is joined up to so many tokens: each join copies what there is.
_MAX_JOINED_TOKENS = 256
# Sound that waits is joined up to so many bytes: clients read events line by line, and some bound a line.
_MAX_JOINED_BYTES = 32 * 1024


class EventBuffer:
    """Events of several answers to one client. Neighbours that wait are joined: text with text, sound with sound."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Event]] = deque()
        self._count = 0  # that were put since the last was taken
        self._loop = asyncio.get_running_loop()
        # Of the one reader, while it waits: an asyncio.Event would cost a twentieth of a text answer's CPU.
        self._came: asyncio.Future[None] | None = None
        self._room = asyncio.Event()

    async def put(self, index: int, event: Event) -> None:
        """Adds an event of answer `index` when there is room."""
        while self._count >= _MAX_WAITING:
            self._room.clear()
            await self._room.wait()
        self.put_now(index, event)

    def put_now(self, index: int, event: Event) -> None:
        self._count += 1
        last = self._waiting[-1] if self._waiting else None
        joined = _joined(last[1], event) if last is not None and last[0] == index else None
        if joined is None:
            self._waiting.append((index, event))
        else:
            self._waiting[-1] = (index, joined)
        self.wake()

    def take(self) -> tuple[int, Event] | None:
        """Removes the first event: (index of its answer, event); None if none waits."""
        if not self._waiting:
            return None
        first = self._waiting.popleft()
        self._count = len(self._waiting)
        if not self._room.is_set():
            self._room.set()
        return first

    def wake(self, *_: object) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    async def wait(self, over: Callable[[], bool]) -> None:
        """Returns when an event waits, or when `over` is true at a `wake`."""
        while not self._waiting and not over():
            self._came = self._loop.create_future()
            await self._came


def _joined(before: Event, event: Event) -> Event | None:
    """None: they do not join, or are too large together."""
    match before, event:
        case TextDelta(first, first_is_plain), TextDelta(second, second_is_plain):
            if first.tool_calls or second.tool_calls or (first.text and second.reasoning):
                return None
            if len(first.token_ids) >= _MAX_JOINED_TOKENS:
                return None
            both = thinker_pb2.GenerateDelta(
                text=first.text + second.text, reasoning=first.reasoning + second.reasoning
            )
            for delta in (first, second):
                both.token_ids.extend(delta.token_ids)
                both.logprobs.extend(delta.logprobs)
            return TextDelta(both, first_is_plain and second_is_plain)
        case AudioDelta(first), AudioDelta(second) if len(first) + len(second) <= _MAX_JOINED_BYTES:
            return AudioDelta(first + second)
    return None
