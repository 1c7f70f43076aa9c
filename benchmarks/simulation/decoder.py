"""code2wav's engine: a step decodes what is there of as many streams as fit."""

from collections import deque
from collections.abc import Callable

from benchmarks.simulation.clock import Clock

STREAMS = 32  # of a step
FIRST_FRAMES = (1, 2, 4, 8)  # of an answer's pieces; each later one has MOST_FRAMES
MOST_FRAMES = 16
_Piece = tuple[int, Callable[[], None]]  # frames, and what is done with them


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
    """Answers' first pieces go before others, whose listeners still have something to hear.

    Args:
        step_s: of so many frames, in seconds.
        most_frames: of a step, but for a single piece.
    """

    def __init__(self, clock: Clock, step_s: Callable[[int], float], most_frames: float) -> None:
        self._clock, self._step_s, self._most_frames = clock, step_s, most_frames
        self._first, self._later = deque[_Piece](), deque[_Piece]()
        self._busy = False
        self.busy_s = 0.0

    def works(self) -> bool:
        return self._busy

    def decode(self, frames: int, is_first: bool, decoded: Callable[[], None]) -> None:
        (self._first if is_first else self._later).append((frames, decoded))
        if not self._busy:
            self._step()

    def _step(self) -> None:
        batch, frames = list[_Piece](), 0
        while waiting := self._first or self._later:
            if batch and (len(batch) == STREAMS or frames + waiting[0][0] > self._most_frames):
                break
            batch.append(waiting.popleft())
            frames += batch[-1][0]
        self._busy = bool(batch)
        if batch:
            length_s = self._step_s(frames)
            self.busy_s += length_s
            self._clock.after(length_s, self._stepped, batch)

    def _stepped(self, batch: list[_Piece]) -> None:
        for _, decoded in batch:
            decoded()
        self._step()
