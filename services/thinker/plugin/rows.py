"""The rows that a thinker keeps of every token: their kinds, where they are kept, and which of them a request wants."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from services.common.stream.rows import ROPE_POSITIONS, layer_of

_EXTRA_ARG = "quartet_rows"

Range = tuple[int, int]
"""Positions from the first (included) to the second (excluded)."""


def layers_of(kinds: "Iterable[RowKind]") -> tuple[int, ...]:
    """The layers whose states are among `kinds`, in their order."""
    return tuple(layer for kind in kinds if (layer := layer_of(kind.name)) is not None)


@dataclass(frozen=True)
class RowKind:
    """Rows of one name: `width` elements a token, of the model's dtype or of the one stated."""

    name: str
    width: int
    dtype: str | None = None

    def torch_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Dtype of its elements."""
        return getattr(torch, self.dtype) if self.dtype else model_dtype


MROPE_POSITIONS = RowKind(ROPE_POSITIONS, 3, "int32")
"""Temporal, height and width position of a token, where the model has three."""


def row_bytes(kinds: Iterable[RowKind], model_dtype: torch.dtype) -> int:
    """Memory of one token's rows."""
    return sum(kind.width * kind.torch_dtype(model_dtype).itemsize for kind in kinds)


class RowStore:
    """Rows of every token whose keys and values are in the KV cache: one of each kind per KV slot.

    A row is written by the forward pass that fills its slot, and so lives exactly as long as the slot's keys and
    values: the rows of a prompt that the prefix cache has are here, nothing is recomputed for them.

    Args:
        num_slots: slots of the KV cache, num_blocks x block_size.
        kinds: what is kept.
        model_dtype: dtype of the model.
        device: where the model is.

    Attributes:
        installed: the store of this process, which is one of vLLM's with one engine in it: the model and the connector
            of a worker, which vLLM makes apart from each other, share it so. None until the KV cache exists, and where
            nothing is to be kept.
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
        """Memory taken."""
        return sum(rows.nbytes for rows in self._by_name.values())

    def write(self, slots: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """Keeps the rows of a batch. No synchronisation and no branch on data: may be captured in a CUDA graph.

        Args:
            slots: (n) int64, negative for padding; may be shorter than the batch, what is beyond it is padding.
            rows: for each kind, in order, (>= n, width).
        """
        count = slots.shape[0]
        slots = torch.where(slots < 0, self._padding_slot, slots)
        for kept, new in zip(self._by_name.values(), rows, strict=True):
            kept.index_copy_(0, slots, new[:count].to(kept.dtype))

    def read(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        """Rows `name` of `slots` ((n) int64): (n, width), on the store's device, a copy."""
        return self._by_name[name].index_select(0, slots)


@dataclass(frozen=True)
class RowRequest:
    """What to send of one request.

    Attributes:
        key: the front end's number for the request; vLLM randomises request ids.
        ranges: for each name of rows the ranges of positions wanted, ascending and apart.
    """

    key: int
    ranges: Mapping[str, list[Range]]

    def to_extra_args(self) -> dict[str, Any]:
        """As `SamplingParams.extra_args`."""
        return {_EXTRA_ARG: asdict(self)}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> "RowRequest | None":
        """What the request wants, if it wants rows."""
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
