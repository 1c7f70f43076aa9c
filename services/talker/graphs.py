"""CUDA graphs of whole talker steps: one launch a frame instead of a thousand."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from services.common import cuda_graph
from services.talker.sampling import prepared_width

if TYPE_CHECKING:
    from services.talker.runner import StepShape

_SHORTEST_LENGTH = 256  # positions


class StepGraphs:
    """Captures a step once for every shape it meets, rounded up to few shapes, and replays it from then on.

    Rows are rounded up to a power of two, so are lengths. Sampling widths are rounded up to a prepared one; a larger
    width is rare and runs uncaptured. A rounded-up step computes the same: rows and positions that do not take part are
    masked, and codes ranked below a row's own top-k are cut off by its rules.

    Args:
        step: what to capture: reads `inputs` and other static tensors, returns its output.
        inputs: (fields, slots), read by the step.
        idle: what a column of `inputs` is for a slot that sits out, (fields,).
        positions: longest length.
    """

    def __init__(
        self,
        step: "Callable[[StepShape], torch.Tensor]",
        inputs: torch.Tensor,
        idle: tuple[int, ...],
        positions: int,
    ) -> None:
        self._step, self._inputs, self._positions = step, inputs, positions
        self._idle = torch.tensor(idle, device=inputs.device)[:, None]
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, shape: "StepShape") -> torch.Tensor:
        """The step's output; on replay a static tensor that the next run overwrites."""
        width = prepared_width(max(shape.width, shape.predictor_width))
        if width is None:
            return self._step(shape)
        rounded = self._round(shape, width)
        if rounded not in self._graphs:
            self._capture(rounded)
        graph, output = self._graphs[rounded]
        graph.replay()
        return output

    def capture_all(self, like: "StepShape") -> None:
        """Captures every number of rows and every length, so that no request has to wait for it later.

        Args:
            like: gives the widths.
        """
        slots, width = self._inputs.shape[1], prepared_width(max(like.width, like.predictor_width))
        assert width is not None
        for rows in (1 << n for n in range((slots - 1).bit_length() + 1)):
            length = _SHORTEST_LENGTH
            while True:
                shape = self._round(replace(like, rows=min(rows, slots), length=min(length, self._positions)), width)
                if shape not in self._graphs:
                    self._capture(shape)
                if length >= self._positions:
                    break
                length *= 2

    def _round(self, shape: "StepShape", width: int) -> "StepShape":
        return replace(
            shape,
            rows=min(self._inputs.shape[1], 1 << (shape.rows - 1).bit_length()),
            # A step in which no slot advances is run as one in which some might: their writes go to spare positions.
            length=min(self._positions, max(_SHORTEST_LENGTH, 1 << max(0, shape.length - 1).bit_length())),
            width=width,
            predictor_width=width,
        )

    def _capture(self, shape: "StepShape") -> None:
        """Captures `shape`. The step runs some times for that, with all slots sitting out, so that no state changes."""
        inputs = self._inputs.clone()
        self._inputs.copy_(self._idle.expand_as(inputs))
        self._graphs[shape] = cuda_graph.capture(lambda: self._step(shape), self._pool, inputs.device)
        self._inputs.copy_(inputs)
