"""What tensor streams carry, as both ends of a stream hold it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """Rows of one kind for consecutive positions.

    Attributes:
        name: kind of row, as in RowSelection.name.
        first_position: of the first row, >= 0.
        tensor: (positions, ...) on the CPU. Whoever puts or gets it must not write to it: it may be the engine's own
            memory, or a peer's.
    """

    name: str
    first_position: int
    tensor: torch.Tensor

    def part(self, first: int, end: int) -> "Rows":
        """Rows `first` to `end` of these, over the same memory."""
        return Rows(self.name, self.first_position + first, self.tensor[first:end])

    def compact(self) -> "Rows":
        """The same rows, in memory of their own if otherwise they would keep much more alive than they are."""
        if self.tensor.untyped_storage().nbytes() <= 2 * self.tensor.nbytes:
            return self
        return Rows(self.name, self.first_position, self.tensor.clone())


@dataclass(frozen=True)
class Chunk:
    """What arrived together: at least one entry."""

    rows: Sequence[Rows]
