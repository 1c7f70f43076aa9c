"""Captured talker steps: one launch a frame instead of two thousand."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from services.common.engine.device import Capturer, power_of_two
from services.talker.sampling import USUAL_WIDTH

_SHORTEST_LENGTH = 256  # positions


@dataclass(frozen=True)
class StepShape:
    """What a step's kernels depend on beside its inputs.

    Attributes:
        rows: the step computes the slots from 0 up to here.
        length: positions that attention looks at; 0: no slot advances.
        width, predictor_width: most codes that a row keeps in group 0, and in the others; 0: all rows are greedy.
    """

    rows: int
    length: int
    width: int
    predictor_width: int


class StepGraphs:
    """Every step there can be, captured before the first request.

    A step runs as the least captured one that covers it. Rows are powers of two. So are lengths, for rows that keep up
    to USUAL_WIDTH codes. Rows that keep more are rare: their steps keep all codes and have lengths of powers of four. A
    larger step computes the same: other rows and positions are masked, and a row's rules cut off codes below its own
    top-k.

    Args:
        capturer: captures the steps, largest first.
        step: reads `inputs` and other static tensors, returns its output.
        inputs: (fields, slots), read by the step.
        idle: column of `inputs` for a slot that sits out, (fields,). All do during the captures: no state changes.
        positions: longest length.
        codes: size of the largest code vocabulary.
        has_lengths: a step costs more for a larger length; else all are captured for the longest.
    """

    def __init__(
        self,
        capturer: Capturer,
        step: Callable[[StepShape], torch.Tensor],
        inputs: torch.Tensor,
        idle: tuple[int, ...],
        positions: int,
        codes: int,
        has_lengths: bool = True,
    ) -> None:
        self._slots, self._positions, self._codes = inputs.shape[1], positions, codes
        self._has_lengths = has_lengths
        inputs.copy_(torch.tensor(idle, device=inputs.device)[:, None].expand_as(inputs))
        self._captured = {shape: capturer.capture(lambda shape=shape: step(shape)) for shape in self._shapes()}

    def run(self, shape: StepShape) -> torch.Tensor:
        """The step's output: a static tensor that the next run overwrites."""
        captured = self._captured[self._covering(shape)]
        captured.replay()
        return captured.output

    def _covering(self, shape: StepShape) -> StepShape:
        rows = min(self._slots, power_of_two(shape.rows))
        is_wide = min(max(shape.width, shape.predictor_width), self._codes) > USUAL_WIDTH
        width = self._codes if is_wide else USUAL_WIDTH
        # A step in which no slot advances is run as one in which some might: their writes go to spare positions.
        length = min(each for each in self._lengths(is_wide) if each >= shape.length)
        return StepShape(rows, length, width, width)

    def _shapes(self) -> Iterator[StepShape]:
        """All that `_covering` may return, the largest first."""
        for is_wide, width in ((True, self._codes), (False, USUAL_WIDTH)):
            if not is_wide or width > USUAL_WIDTH:
                for rows, length in product(_powers(2, self._slots, least=1), self._lengths(is_wide)):
                    yield StepShape(rows, length, width, width)

    def _lengths(self, is_wide: bool) -> list[int]:
        least = _SHORTEST_LENGTH if self._has_lengths else self._positions
        return _powers(4 if is_wide else 2, self._positions, least)


def _powers(base: int, largest: int, least: int) -> list[int]:
    """`largest`, then the powers of `base` below it, down to `least`."""
    powers = [base**n for n in reversed(range(largest.bit_length()))]
    return [largest, *(size for size in powers if least <= size < largest)]
