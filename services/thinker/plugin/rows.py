"""The rows that a thinker keeps of every token, and which of them a request wants."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

ROPE_POSITIONS = "rope_positions"
_HIDDEN_STATES = "hidden_states."
_EXTRA_ARG = "quartet_rows"

Range = tuple[int, int]
"""Positions from the first (included) to the second (excluded)."""


def hidden_states(layer: int) -> str:
    """Name of the rows of a layer's states; layer 0 is the embeddings."""
    return f"{_HIDDEN_STATES}{layer}"


def layers_of(kinds: "Iterable[RowKind]") -> tuple[int, ...]:
    """The layers whose states are among `kinds`, in their order."""
    names = (kind.name for kind in kinds if kind.name.startswith(_HIDDEN_STATES))
    return tuple(int(name.removeprefix(_HIDDEN_STATES)) for name in names)


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
        return {_EXTRA_ARG: {"key": self.key, "ranges": {name: list(ranges) for name, ranges in self.ranges.items()}}}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> "RowRequest | None":
        """What the request wants, if it wants rows."""
        if not extra_args or _EXTRA_ARG not in extra_args:
            return None
        arg = extra_args[_EXTRA_ARG]
        return cls(arg["key"], {name: [(a, b) for a, b in ranges] for name, ranges in arg["ranges"].items()})

    def between(self, first: int, end: int) -> list[tuple[str, Range]]:
        """The wanted ranges within positions `first` to `end`."""
        return [
            (name, (max(a, first), min(b, end)))
            for name, ranges in self.ranges.items()
            for a, b in ranges
            if max(a, first) < min(b, end)
        ]
