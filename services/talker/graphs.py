"""Captured talker steps: one launch a frame instead of two thousand."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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

    A step runs as the least captured one that covers it. Rows and lengths are powers of two, for rows that keep up to
    USUAL_WIDTH codes. Rows that keep more are rare: for each number of rows, one step has the longest length and all
    codes. A larger step computes the same: other rows and positions are masked, and a row's rules cut off codes below
    its own top-k.

    Args:
        capturer: captures the steps, largest first.
        step: reads `inputs` and other static tensors, returns its output.
        inputs: (fields, slots), read by the step.
        idle: column of `inputs` for a slot that sits out, (fields,). All do during the captures: no state changes.
        positions: longest length.
        codes: size of the largest code vocabulary.
    """

    def __init__(
        self,
        capturer: Capturer,
        step: Callable[[StepShape], torch.Tensor],
        inputs: torch.Tensor,
        idle: tuple[int, ...],
        positions: int,
        codes: int,
    ) -> None:
        self._slots, self._positions, self._codes = inputs.shape[1], positions, codes
        inputs.copy_(torch.tensor(idle, device=inputs.device)[:, None].expand_as(inputs))
        self._captured = {shape: capturer.capture(lambda shape=shape: step(shape)) for shape in self._shapes()}

    def run(self, shape: StepShape) -> torch.Tensor:
        """The step's output: a static tensor that the next run overwrites."""
        captured = self._captured[self._covering(shape)]
        captured.replay()
        return captured.output

    def _covering(self, shape: StepShape) -> StepShape:
        rows = min(self._slots, power_of_two(shape.rows))
        if min(max(shape.width, shape.predictor_width), self._codes) > USUAL_WIDTH:
            return StepShape(rows, self._positions, self._codes, self._codes)
        # A step in which no slot advances is run as one in which some might: their writes go to spare positions.
        length = min(self._positions, max(_SHORTEST_LENGTH, power_of_two(shape.length)))
        return StepShape(rows, length, USUAL_WIDTH, USUAL_WIDTH)

    def _shapes(self) -> Iterator[StepShape]:
        """All that `_covering` may return, the largest first."""
        row_counts = _halving(self._slots, least=1)
        if self._codes > USUAL_WIDTH:
            yield from (StepShape(rows, self._positions, self._codes, self._codes) for rows in row_counts)
        for rows in row_counts:
            for length in _halving(self._positions, least=_SHORTEST_LENGTH):
                yield StepShape(rows, length, USUAL_WIDTH, USUAL_WIDTH)


def _halving(largest: int, least: int) -> list[int]:
    """`largest`, then the powers of two below it, down to `least`."""
    powers = (1 << n for n in reversed(range(largest.bit_length())))
    return [largest, *(size for size in powers if least <= size < largest)]
