"""Rows of tensors, and the chunks that streams carry them in."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from quartet.v1 import stream_pb2
from services.common.stream.tensors import fill

# Names of rows, which stages agree on.
TOKEN_IDS = "token_ids"
ROPE_POSITIONS = "rope_positions"
CODES = "codes"
_HIDDEN_STATES = "hidden_states."


def hidden_states(layer: int) -> str:
    """Name of a layer's states; layer 0 is the embeddings."""
    return f"{_HIDDEN_STATES}{layer}"


def layer_of(name: str) -> int | None:
    """The layer of `hidden_states(layer)`; None for other names."""
    return int(name.removeprefix(_HIDDEN_STATES)) if name.startswith(_HIDDEN_STATES) else None


@dataclass(frozen=True)
class Rows:
    """Rows of one kind for consecutive positions.

    Attributes:
        name: kind of row, as in RowSelection.name.
        first_position: of the first row, >= 0.
        tensor: (positions, ...) on the CPU, read-only: it may be the engine's own memory, or a peer's.
        put_s: time.monotonic() seconds at which a stream took it; 0 before.
    """

    name: str
    first_position: int
    tensor: torch.Tensor
    put_s: float = 0.0

    def part(self, first: int, end: int) -> "Rows":
        """Rows `first` to `end`, over the same memory."""
        return Rows(self.name, self.first_position + first, self.tensor[first:end], self.put_s)

    def compact(self) -> "Rows":
        """The same rows, copied if they keep more than twice their size alive."""
        if self.tensor.untyped_storage().nbytes() <= 2 * self.tensor.nbytes:
            return self
        return replace(self, tensor=self.tensor.clone())


@dataclass(frozen=True)
class Chunk:
    """Rows that arrived together, at least one."""

    rows: Sequence[Rows]


def is_selected(rows: Rows, selection: Mapping[str, stream_pb2.Positions], prompt_positions: int) -> bool:
    """Whether a consumer of `selection` (by name; everything if empty) wants `rows`. Engines put prompt and output rows
    apart, and select multimodal positions themselves."""
    if rows.name not in selection:
        return not selection
    positions = selection[rows.name]
    in_prompt = rows.first_position < prompt_positions
    if positions in (stream_pb2.POSITIONS_PROMPT, stream_pb2.POSITIONS_PROMPT_MULTIMODAL):
        return in_prompt
    return not in_prompt or positions != stream_pb2.POSITIONS_OUTPUT


def take_inline(pending: deque[Rows], limit_bytes: int, own_chunk_bytes: float) -> stream_pb2.StreamChunk:
    """Takes one chunk off `pending`: several small rows, or a part of a large one. Rows of `own_chunk_bytes` or more
    are taken only if they are the first."""
    chunk, room_bytes = stream_pb2.StreamChunk(), limit_bytes
    while pending and room_bytes > 0:
        rows = pending[0]
        count = len(rows.tensor)
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
    return chunk


def end_position(chunk: stream_pb2.StreamChunk) -> int:
    """One past the last position in `chunk`."""
    return max(rows.first_position + rows.tensor.shape[0] for rows in chunk.rows)
