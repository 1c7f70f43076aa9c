"""A request's output stream: token ids, hidden states and rope positions on their way to the talker."""

from collections.abc import Iterable, Sequence

import torch

from quartet.v1 import stream_pb2
from services.common.stream.output_stream import OutputStream
from services.common.stream.rows import Rows
from services.thinker.engine import Tap
from services.thinker.plugin.rows import ROPE_POSITIONS, Range, hidden_states
from services.thinker.plugin.shipping import ShippedRows
from services.thinker.prompt import Prompt

TOKEN_IDS = "token_ids"
_UNBOUNDED = 2**62


def offered_rows(layers: Iterable[int]) -> list[str]:
    """Names of the rows that a stream of a thinker offers which keeps the states of `layers`."""
    return [TOKEN_IDS, *map(hidden_states, layers), ROPE_POSITIONS]


class OutputCapture:
    """Fills `stream` for one request.

    Token ids go out as they are sampled. Rows of output positions are held until the token of their position went
    out, so that nothing follows the last token that does: a terminating token's rows, and what the engine computed
    ahead, stay here.
    """

    def __init__(self, stream: OutputStream, prompt: Prompt, selections: Sequence[stream_pb2.RowSelection]) -> None:
        self._stream = stream
        self._prompt = prompt
        self._selections = selections
        self._end = len(prompt.token_ids)
        self._held: list[ShippedRows] = []
        self._closed = False
        stream.start(self._end)
        self._put_tokens(0, prompt.token_ids)

    def tap(self) -> Tap | None:
        """What the engine is to ship, or None if the consumer wants token ids only."""
        ranges = {
            selection.name: self._ranges(selection) for selection in self._selections if selection.name != TOKEN_IDS
        }
        return Tap(ranges, self._receive) if ranges else None

    def _ranges(self, selection: stream_pb2.RowSelection) -> list[Range]:
        prompt_end = len(self._prompt.token_ids)
        prompt, output = (0, prompt_end), (prompt_end, _UNBOUNDED)
        if selection.positions == stream_pb2.POSITIONS_PROMPT_MULTIMODAL:
            return self._prompt.multimodal
        if selection.positions == stream_pb2.POSITIONS_PROMPT:
            return [prompt]
        if selection.positions == stream_pb2.POSITIONS_OUTPUT:
            return [output]
        return [prompt, output]

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Newly sampled token ids, without a terminating one."""
        if self._closed or not token_ids:
            return
        self._put_tokens(self._end, token_ids)
        self._end += len(token_ids)
        held, self._held = self._held, []
        for rows in held:
            self._receive(rows)

    def close(self) -> None:
        """No later token is for the consumer."""
        self._closed = True

    def finish(self) -> None:
        """The request is complete, and all of its rows came."""
        self._stream.finish(self._end)

    def _put_tokens(self, first_position: int, token_ids: Sequence[int]) -> None:
        self._put(TOKEN_IDS, first_position, torch.tensor(token_ids, dtype=torch.int32))

    def _receive(self, rows: ShippedRows) -> None:
        fitting = min(len(rows.rows), self._end - rows.first_position)
        if fitting > 0:
            self._put(rows.name, rows.first_position, rows.rows[:fitting])
        if fitting < len(rows.rows) and not self._closed:
            fitting = max(fitting, 0)
            self._held.append(ShippedRows(rows.name, rows.first_position + fitting, rows.rows[fitting:]))

    def _put(self, name: str, first_position: int, rows: torch.Tensor) -> None:
        self._stream.put([Rows(name, first_position, rows)])
