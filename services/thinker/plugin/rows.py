"""The rows that a thinker keeps of every token: their kinds, their store, and which of them a request wants."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from services.common.stream.rows import ROPE_POSITIONS, layer_of

_EXTRA_ARG = "quartet_rows"

Range = tuple[int, int]
"""Positions from the first (included) to the second (excluded)."""


def layers_of(kinds: "Iterable[RowKind]") -> tuple[int, ...]:
    """The layers whose states are among `kinds`, in order."""
    return tuple(layer for kind in kinds if (layer := layer_of(kind.name)) is not None)


@dataclass(frozen=True)
class RowKind:
    """Rows of one name: `width` elements a token, of `dtype` or else the model's."""

    name: str
    width: int
    dtype: str | None = None

    def torch_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return getattr(torch, self.dtype) if self.dtype else model_dtype


MROPE_POSITIONS = RowKind(ROPE_POSITIONS, 3, "int32")
"""Temporal, height and width position of a token."""


def row_bytes(kinds: Iterable[RowKind], model_dtype: torch.dtype) -> int:
    """Memory of one token's rows."""
    return sum(kind.width * kind.torch_dtype(model_dtype).itemsize for kind in kinds)


class RowStore:
    """Rows of every token whose keys and values are in the KV cache: one of each kind per KV slot.

    The forward pass that fills a slot writes its row, which so lives as long as the slot's keys and values.

    Args:
        num_slots: slots of the KV cache, num_blocks x block_size.

    Attributes:
        installed: the store of this process, by which a worker's model and connector share it. None: there is no KV
            cache yet, or nothing to keep.
    """

    installed: "ClassVar[RowStore | None]" = None

    def __init__(
        self, num_slots: int, kinds: Sequence[RowKind], model_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device = device
        self.num_slots = num_slots
        self._padding_slot = num_slots  # one row more takes the padding of a batch
        self._by_name = {  # not filled: on a CPU, what is never written takes no memory, and its start no time
            kind.name: torch.empty(num_slots + 1, kind.width, dtype=kind.torch_dtype(model_dtype), device=device)
            for kind in kinds
        }

    @property
    def size_bytes(self) -> int:
        return sum(rows.nbytes for rows in self._by_name.values())

    def write(self, slots: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """Keeps the rows of a batch. Without synchronisation or branches on data, for CUDA graphs.

        Args:
            slots: (n) int64, negative for padding. Rows of the batch beyond them are padding, too.
            rows: (>= n, width) for each kind in order.
        """
        count = slots.shape[0]
        slots = torch.where(slots < 0, self._padding_slot, slots)
        for kept, new in zip(self._by_name.values(), rows, strict=True):
            kept.index_copy_(0, slots, new[:count].to(kept.dtype))

    def read(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        """A copy of the rows `name` of `slots` ((n) int64): (n, width), on the store's device."""
        return self._by_name[name].index_select(0, slots)


@dataclass(frozen=True)
class RowRequest:
    """What to send of one request.

    Attributes:
        key: the front end's number for the request, as vLLM randomises request ids.
        ranges: wanted positions by name of the rows, ascending and apart.
    """

    key: int
    ranges: Mapping[str, list[Range]]

    def to_extra_args(self) -> dict[str, Any]:
        return {_EXTRA_ARG: asdict(self)}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> "RowRequest | None":
        """From `SamplingParams.extra_args`; None: the request wants no rows."""
        wanted = (extra_args or {}).get(_EXTRA_ARG)
        return cls(**wanted) if wanted else None

    def between(self, first: int, end: int) -> list[tuple[str, Range]]:
        """The wanted ranges within positions `first` to `end`."""
        return [
            (name, (max(a, first), min(b, end)))
            for name, ranges in self.ranges.items()
            for a, b in ranges
            if max(a, first) < min(b, end)
        ]
