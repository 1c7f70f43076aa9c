"""Rows of tensors, which streams carry, and the chunks they are cut into."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quartet.v1 import stream_pb2
from services.common.stream.tensors import fill


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


class Selection:
    """Which rows a consumer wants: positions by name, everything if it names none."""

    def __init__(self, rows: Mapping[str, stream_pb2.Positions]) -> None:
        self.prompt_positions = 0
        self._rows = rows

    def wants(self, rows: Rows) -> bool:
        """Whether `rows` is of a wanted kind and part. Engines put prompt and output rows apart, and select the
        multimodal positions themselves."""
        if not self._rows:
            return True
        if rows.name not in self._rows:
            return False
        positions = self._rows[rows.name]
        in_prompt = rows.first_position < self.prompt_positions
        if positions in (stream_pb2.POSITIONS_PROMPT, stream_pb2.POSITIONS_PROMPT_MULTIMODAL):
            return in_prompt
        return not in_prompt or positions != stream_pb2.POSITIONS_OUTPUT


def take_inline(
    pending: deque[Rows], limit_bytes: int, selection: Selection, own_chunk_bytes: float
) -> tuple[stream_pb2.StreamChunk, int]:
    """Takes what fits into one chunk off `pending`: several small rows together, or a part of a large one. Returns it,
    and how many positions `pending` lost, those that nobody wants included.

    Rows of `own_chunk_bytes` or more are taken only if they are the first.
    """
    chunk, room_bytes, passed = stream_pb2.StreamChunk(), limit_bytes, 0
    while pending:
        rows = pending[0]
        count = len(rows.tensor)
        if not selection.wants(rows):
            pending.popleft()
            passed += count
            continue
        if chunk.rows and rows.tensor.nbytes >= own_chunk_bytes:
            break
        row_bytes = max(1, rows.tensor.nbytes // count)
        fitting = min(count, room_bytes // row_bytes or (0 if chunk.rows else 1))
        if not fitting:
            break
        pending.popleft()
        if fitting < count:
            pending.appendleft(rows.part(fitting, count))
            rows = rows.part(0, fitting)
        fill(chunk.rows.add(name=rows.name, first_position=rows.first_position).tensor, rows.tensor)
        room_bytes -= fitting * row_bytes
        passed += fitting
        if room_bytes <= 0:
            break
    return chunk, passed


def end_position(chunk: stream_pb2.StreamChunk) -> int:
    """One past the last position in `chunk`."""
    return max(rows.first_position + rows.tensor.shape[0] for rows in chunk.rows)
