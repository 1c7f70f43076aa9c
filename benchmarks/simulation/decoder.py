"""code2wav's engine: a step decodes what is there of as many streams as fit."""

from collections import deque
from collections.abc import Callable

from benchmarks.simulation.clock import Clock

STREAMS = 32  # of a step
FIRST_FRAMES = (1, 2, 4, 8)  # of an answer's pieces; each later one has MOST_FRAMES
MOST_FRAMES = 16


def pieces(frames: int) -> list[int]:
    """The frames of an answer's pieces of sound: small while the listener has little ahead."""
    found, left = list[int](), frames
    for size in FIRST_FRAMES:
        if left > 0:
            found.append(min(size, left))
            left -= size
    while left > 0:
        found.append(min(MOST_FRAMES, left))
        left -= MOST_FRAMES
    return found


class Decoder:
    """`step_s`: of so many frames, in seconds."""

    def __init__(self, clock: Clock, step_s: Callable[[int], float]) -> None:
        self._clock, self._step_s = clock, step_s
        self._waiting = deque[tuple[int, Callable[[], None]]]()
        self._busy = False
        self.busy_s = 0.0

    def decode(self, frames: int, decoded: Callable[[], None]) -> None:
        self._waiting.append((frames, decoded))
        if not self._busy:
            self._step()

    def _step(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(STREAMS, len(self._waiting)))]
        self._busy = bool(batch)
        if batch:
            length_s = self._step_s(sum(frames for frames, _ in batch))
            self.busy_s += length_s
            self._clock.after(length_s, self._stepped, batch)

    def _stepped(self, batch: list[tuple[int, Callable[[], None]]]) -> None:
        for _, decoded in batch:
            decoded()
        self._step()
