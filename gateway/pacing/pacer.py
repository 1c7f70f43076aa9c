"""Releases a session's sound in real time, as a client plays it that cannot drop what it has received.

A model makes speech several times as fast as it is heard. Who plays all that arrives can only be interrupted by a
server that has not sent it yet."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.media.encode import BYTES_PER_SAMPLE

SILENCE = ""  # the item of sound that is no item's; it gives way to any other


@dataclass(frozen=True)
class CutItem:
    """An item that was dropped before its end. `played_ms`: what was released of it, 0 for none."""

    item_id: str
    played_ms: int


@dataclass
class _Sound:
    item_id: str
    pcm16: bytearray = field(default_factory=bytearray)
    is_ended: bool = False


_Mark = Callable[[], None]


class Pacer:
    """A queue of mono PCM16, of which frames leave when they are due.

    Args:
        send: takes each frame (item id, PCM16). All frames have the same length.
        ahead_ms: a frame ends at most this long after now when it leaves.
        fills_gaps: sends silence while an item goes on and its sound is late.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        send: Callable[[str, bytes], None],
        rate_hz: int,
        frame_ms: int = 20,
        ahead_ms: int = 200,
        *,
        fills_gaps: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._rate_hz, self._now, self._fills_gaps = send, rate_hz, now, fills_gaps
        self._frame_s, self._ahead_s = frame_ms / 1000, ahead_ms / 1000
        self._frame_bytes = rate_hz * frame_ms // 1000 * BYTES_PER_SAMPLE
        self._queue = deque[_Sound | _Mark]()
        self._queued_bytes = 0
        self._released: dict[str, int] = {}  # bytes by the id of an item that is not over
        self._plays_until = 0.0  # when what was released has been played
        self._sounds_until = 0.0  # when the last of it that is no silence has been played
        self._changed = asyncio.Event()
        self._is_filling = False
        self.gaps, self.late_ms = 0, 0.0  # within items: a listener hears nothing; how long in sum

    @property
    def queued_ms(self) -> float:
        """Sound that has not left."""
        return 1000 * self._queued_bytes / BYTES_PER_SAMPLE / self._rate_hz

    @property
    def plays_until(self) -> float:
        """When a client that plays at once has played what left, by `now`; in the past if it is silent."""
        return self._plays_until

    @property
    def is_playing(self) -> bool:
        """Whether an item's sound waits, or is heard now."""
        waits = any(isinstance(each, _Sound) and each.item_id != SILENCE for each in self._queue)
        return waits or self._sounds_until > self._now()

    def released_ms(self, item_id: str) -> int:
        """The part of an item that has left; 0 if the item is over or unknown."""
        return self._released.get(item_id, 0) * 1000 // BYTES_PER_SAMPLE // self._rate_hz

    def add(self, item_id: str, pcm16: bytes) -> None:
        """Queues sound of an item. Items follow one another: more of an earlier one opens it again."""
        last = self._queue[-1] if self._queue else None
        if item_id != SILENCE and isinstance(last, _Sound) and last.item_id == SILENCE:
            self._queued_bytes -= len(self._queue.pop().pcm16)  # pyright: ignore[reportAttributeAccessIssue]
            last = self._queue[-1] if self._queue else None
        if not isinstance(last, _Sound) or last.item_id != item_id or last.is_ended:
            last = _Sound(item_id)
            self._queue.append(last)
        last.pcm16 += pcm16
        self._queued_bytes += len(pcm16)
        self._changed.set()

    def end(self, item_id: str) -> None:
        """All of the item's sound is queued: its last frame is filled up with silence."""
        for each in self._queue:
            if isinstance(each, _Sound) and each.item_id == item_id:
                each.is_ended = True
        self._changed.set()

    def mark(self, action: Callable[[], None]) -> None:
        """Runs `action` when the sound that is queued so far has left, or at once; never if that is dropped."""
        self._queue.append(action)
        self._changed.set()

    def clear(self) -> list[CutItem]:
        """Drops what has not left, marks too. Returns what was cut, in order."""
        items = dict.fromkeys(each.item_id for each in self._queue if isinstance(each, _Sound))
        cuts = [CutItem(item_id, self.released_ms(item_id)) for item_id in items if item_id != SILENCE]
        self._queue.clear()
        self._released.clear()
        self._queued_bytes = 0
        return cuts

    async def run(self) -> None:
        """Releases frames until it is cancelled."""
        while True:
            self._changed.clear()
            wait_s = self._release()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _release(self) -> float | None:
        """Sends what is due. Returns the seconds until more is; None: more must come first."""
        while self._queue:
            first = self._queue[0]
            if not isinstance(first, _Sound):
                self._queue.popleft()
                first()
                continue
            if len(first.pcm16) < self._frame_bytes and not first.is_ended and len(self._queue) > 1:
                self._go_beyond(first)
                continue
            if first.is_ended and not first.pcm16:
                self._queue.popleft()
                self._released.pop(first.item_id, None)
                continue
            now = self._now()
            due_s = self._plays_until + self._frame_s - self._ahead_s - now
            if due_s > 0:
                return due_s
            if len(first.pcm16) >= self._frame_bytes or first.is_ended:
                self._send_frame(first, now)
            elif not self._fills_gaps or first.item_id not in self._released:
                return None
            elif (gap_s := self._plays_until - now) > 0:  # until the gap is heard
                return gap_s
            else:
                self._fill(now)
        return None

    def _go_beyond(self, first: _Sound) -> None:
        """Takes what is behind a rest of less than a frame: more of the item, a mark, or another item."""
        second = self._queue[1]
        if isinstance(second, _Sound) and second.item_id != first.item_id:
            first.is_ended = True
            return
        del self._queue[1]
        if isinstance(second, _Sound):
            first.pcm16 += second.pcm16
            first.is_ended = second.is_ended
        else:
            second()

    def _send_frame(self, sound: _Sound, now: float) -> None:
        frame = bytes(sound.pcm16[: self._frame_bytes])
        del sound.pcm16[: self._frame_bytes]
        self._queued_bytes -= len(frame)
        if sound.item_id in self._released and now > self._plays_until:
            self.gaps, self.late_ms = self.gaps + 1, self.late_ms + 1000 * (now - self._plays_until)
        self._released[sound.item_id] = self._released.get(sound.item_id, 0) + len(frame)
        self._plays_until, self._is_filling = max(self._plays_until, now) + self._frame_s, False
        if sound.item_id != SILENCE:
            self._sounds_until = self._plays_until
        self._send(sound.item_id, frame.ljust(self._frame_bytes, b"\0"))

    def _fill(self, now: float) -> None:
        self.gaps, self.late_ms = self.gaps + (not self._is_filling), self.late_ms + 1000 * self._frame_s
        self._plays_until, self._is_filling = max(self._plays_until, now) + self._frame_s, True
        self._send(SILENCE, bytes(self._frame_bytes))
