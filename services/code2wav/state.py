"""What a stream carries from one step to the next, for a fixed number of streams.

Every layer that looks back owns a piece of it: the last inputs of a convolution, the window of keys and values of an
attention layer. All is zero at the start of a stream, which is exactly the zero padding of a whole decode. A stream's
pieces lie in one row of one tensor, its slot, so that a batch is gathered and put back by one indexing each, wherever
its streams stand, and is a mere view where their slots follow on each other.
"""

import math
from collections.abc import Sequence

import torch

from services.code2wav.family import States


class StateLayout:
    """Where in a slot each layer's piece lies. Filled while the layers are made."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.sizes: list[int] = []

    def add(self, shape: tuple[int, ...]) -> int:
        """Reserves a piece of a shape (without the stream dimension); returns its index."""
        self.shapes.append(shape)
        self.sizes.append(math.prod(shape))
        return len(self.shapes) - 1

    def of(self, rows: torch.Tensor) -> "Carry":
        """The pieces of `rows`, (streams, values a slot)."""
        pieces = rows.split(self.sizes, dim=1)
        return Carry([piece.unflatten(1, shape) for piece, shape in zip(pieces, self.shapes, strict=True)])


class Carry:
    """What the layers of one step take from the step before and leave for the next."""

    def __init__(self, pieces: list[torch.Tensor]) -> None:
        self._taken = pieces
        self._kept = list(pieces)

    def take(self, piece: int) -> torch.Tensor:
        """A layer's state before the step, (streams, ...)."""
        return self._taken[piece]

    def keep(self, piece: int, state: torch.Tensor) -> None:
        """A layer's state after the step, (streams, ...)."""
        self._kept[piece] = state

    def rows(self) -> torch.Tensor:
        """All states after the step, (streams, values a slot)."""
        return torch.cat([state.flatten(1) for state in self._kept], dim=1)


class CausalStates(States):
    """States of up to `slots` streams of a causal decoder.

    Args:
        layout: what a slot holds.
        slots: streams that can be open at a time. One row more takes what padding of a batch writes.
    """

    def __init__(self, layout: StateLayout, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(slots)
        self.memory = torch.zeros(slots + 1, sum(layout.sizes), dtype=dtype, device=device)
        self.frames = [0] * slots

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot."""
        return self.memory[0].nbytes

    @property
    def padding_slot(self) -> int:
        """The row that belongs to no stream."""
        return self.slots

    def open(self, slot: int, voice: str, seed: int) -> None:
        """Forgets what the stream before left in `slot`."""
        self.frames[slot] = 0
        self.memory[slot].zero_()

    def batch(self, slots: Sequence[int]) -> "CausalBatch":
        """The states of the streams in `slots` (all different), in that order."""
        return CausalBatch(self, slots)


class CausalBatch:
    """States of the streams that step together."""

    def __init__(self, states: CausalStates, slots: Sequence[int]) -> None:
        self.states = states
        self.slots = list(slots)
        self.frames = [states.frames[slot] for slot in self.slots]
        """Frames that each stream has decoded so far."""

    def load(self) -> torch.Tensor:
        """The streams' states, (streams, values a slot); a view if their slots follow on each other."""
        first, count = self.slots[0], len(self.slots)
        if self.slots == list(range(first, first + count)):
            return self.states.memory[first : first + count]
        return self.states.memory.index_select(0, torch.tensor(self.slots, device=self.states.memory.device))

    def store(self, rows: torch.Tensor) -> None:
        """Replaces the streams' states."""
        self.states.memory.index_copy_(0, torch.tensor(self.slots, device=rows.device), rows)

    def advance(self, frames: int) -> None:
        """Counts the frames of a finished step."""
        for slot in self.slots:
            self.states.frames[slot] += frames
