"""Names of the rows a thinker keeps, and which of them a request wants."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_POSITIONS = "rope_positions"
_HIDDEN_STATES = "hidden_states."
_EXTRA_ARG = "quartet_rows"

Range = tuple[int, int]
"""Positions from the first (included) to the second (excluded)."""


def hidden_states(layer: int) -> str:
    """Name of the rows of a layer's states; layer 0 is the embeddings."""
    return f"{_HIDDEN_STATES}{layer}"


@dataclass(frozen=True)
class Capture:
    """What to ship of one request.

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
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> "Capture | None":
        """The request's capture, if it has one."""
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
