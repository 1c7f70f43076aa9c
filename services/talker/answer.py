"""The rows of one answer of a thinker, checked as they come."""

from abc import abstractmethod
from typing import Any

import torch

from quartet.v1 import stream_pb2
from services.common.errors import InvalidInput
from services.common.stream.rows import ROPE_POSITIONS, TOKEN_IDS, Rows
from services.talker.inputs import SpeechInput

MOST_POSITIONS = 2**19  # of a prompt, and of prompt and answer: twice the longest context
_MOST_ROPE_POSITION = torch.iinfo(torch.int32).max


def id_list(ids: Any) -> list[int]:
    """The list of an integer tensor of one dimension."""
    return ids.tolist()


class AnswerRows(SpeechInput):
    """Collects one answer from a thinker's rows: token ids of all positions, states of some of them, and rope positions
    of the prompt. Kinds of rows come in any order, but token ids before the states of their positions.

    Args:
        states: kind of the states, as in `Rows.name`.
        width: of a state.
        positions: of which the states are wanted.

    Attributes:
        wanted: the rows to subscribe to, in the order in which kinds are added if all are there at once.
        answer: ids that were not taken yet.
        rope: the prompt's rope positions, pieces of (n, 3).
    """

    def __init__(self, states: str, width: int, positions: "stream_pb2.Positions", text_vocab: int) -> None:
        self.wanted = [
            stream_pb2.RowSelection(name=TOKEN_IDS, positions=stream_pb2.POSITIONS_ALL),
            stream_pb2.RowSelection(name=states, positions=positions),
            stream_pb2.RowSelection(name=ROPE_POSITIONS, positions=stream_pb2.POSITIONS_PROMPT),
        ]
        self.prompt: list[int] = []
        self.answer: list[int] = []
        self.rope: list[torch.Tensor] = []
        self._states, self._width, self._text_vocab = states, width, text_vocab
        self._prompt_positions: int | None = None
        self._next = {selection.name: 0 for selection in self.wanted}

    def begin(self, prompt_positions: int) -> None:
        """Takes the stream's header. Raises InvalidInput: there is no prompt, or it is too long."""
        if not 1 <= prompt_positions <= MOST_POSITIONS:
            raise InvalidInput("header.prompt_positions", f"must be 1 to {MOST_POSITIONS}")
        self._prompt_positions = prompt_positions

    def add(self, rows: Rows) -> None:
        """Takes rows, in the order of their positions.

        Raises:
            InvalidInput: an unknown kind, a wrong shape or dtype, rows out of order, or values out of range.
        """
        name, first, tensor = rows.name, rows.first_position, rows.tensor
        if self._prompt_positions is None:
            raise InvalidInput("header", "must come before the rows")
        if name not in self._next:
            raise InvalidInput("rows.name", f"'{name}' is not read; this talker reads {sorted(self._next)}")
        expected, are_states = self._next[name], name == self._states
        if tensor.dim() == 0 or first < expected:
            raise InvalidInput(name, f"rows from position {first} come after {expected}")
        if first + len(tensor) > MOST_POSITIONS:
            raise InvalidInput(name, f"has more than {MOST_POSITIONS} positions")
        self._next[name] = first + len(tensor)
        tail = (self._width,) if are_states else (3,) if name == ROPE_POSITIONS else ()
        if tuple(tensor.shape[1:]) != tail or tensor.is_floating_point() != are_states:
            kind = "a float dtype" if are_states else "integers"
            raise InvalidInput(name, f"must have shape (positions, {', '.join(map(str, tail))}) of {kind}")
        if not are_states and first != expected:
            raise InvalidInput(name, f"positions before {first} are missing")
        if name == TOKEN_IDS:
            self._add_tokens(tensor, self._prompt_positions)
        elif name == ROPE_POSITIONS:
            self._add_rope(tensor)
        else:
            self._add_states(first, expected, tensor, self._prompt_positions)

    def _add_tokens(self, rows: torch.Tensor, prompt_positions: int) -> None:
        ids = id_list(rows)
        if ids and not (min(ids) >= 0 and max(ids) < self._text_vocab):
            raise InvalidInput(TOKEN_IDS, f"must be 0 to {self._text_vocab - 1}")
        room = prompt_positions - len(self.prompt)
        self.prompt += ids[:room]
        self.answer += ids[room:]

    def _add_rope(self, rows: torch.Tensor) -> None:
        rows = rows.clone()  # the thinker may use its memory again: what is checked must stay so
        if len(rows) and not (rows.min() >= 0 and rows.max() <= _MOST_ROPE_POSITION):
            raise InvalidInput(ROPE_POSITIONS, f"must be 0 to {_MOST_ROPE_POSITION}")
        self.rope.append(rows)

    @abstractmethod
    def _add_states(self, first: int, expected: int, rows: torch.Tensor, prompt_positions: int) -> None:
        """Keeps the needed states from position `first` on; `expected` is the end of those before."""

    @property
    def has_prompt_ids(self) -> bool:
        """Whether all ids of the prompt are here."""
        return self._prompt_positions is not None and len(self.prompt) == self._prompt_positions

    @property
    def has_prompt_rope(self) -> bool:
        """Whether all rope positions of the prompt are here."""
        return self._prompt_positions is not None and self._next[ROPE_POSITIONS] >= self._prompt_positions

    @property
    def is_empty(self) -> bool:
        return self._next[TOKEN_IDS] == self._prompt_positions

    @property
    def tokens(self) -> int:
        """Ids of the answer so far, without those that the prompt has."""
        return self._next[TOKEN_IDS] - len(self.prompt)
