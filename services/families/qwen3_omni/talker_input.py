"""Collects what a thinker sends of one answer: token ids, states of media, rope positions."""

import torch

from quartet.v1 import stream_pb2
from services.common.rpc.errors import InvalidInput
from services.common.stream.rows import Rows
from services.families.qwen3_omni.talker_prompt import PromptSpec, ThinkerPrompt, answer_head, is_media, talker_prompt
from services.talker.family import Prompt, Text

TOKEN_IDS = "token_ids"
ROPE_POSITIONS = "rope_positions"
_MOST_ROPE_POSITION = torch.iinfo(torch.int32).max


class AnswerInput:
    """A `services.talker.family.ThinkerInput`. Token ids must come before the states of their positions.

    Args:
        spec: of the checkpoint.
        text_vocab: ids of text.
        speaker: the voice that says it.
    """

    def __init__(self, spec: PromptSpec, text_vocab: int, speaker: str) -> None:
        self.wanted = [
            stream_pb2.RowSelection(name=TOKEN_IDS, positions=stream_pb2.POSITIONS_ALL),
            stream_pb2.RowSelection(name=spec.states, positions=stream_pb2.POSITIONS_PROMPT_MULTIMODAL),
            stream_pb2.RowSelection(name=ROPE_POSITIONS, positions=stream_pb2.POSITIONS_PROMPT),
        ]
        self._spec, self._text_vocab, self._speaker = spec, text_vocab, speaker
        self._prompt_positions: int | None = None
        self._prompt: list[int] = []
        self._answer: list[int] = []
        self._taken = 0
        self._head: list[int] = []
        self._rope: list[torch.Tensor] = []
        self._states: list[torch.Tensor] = []
        self._next = {selection.name: 0 for selection in self.wanted}

    def begin(self, prompt_positions: int) -> None:
        """The stream's header.

        Raises:
            InvalidInput: there is no prompt.
        """
        if prompt_positions < 1:
            raise InvalidInput("header.prompt_positions", "must be at least 1")
        self._prompt_positions = prompt_positions

    def add(self, rows: Rows) -> None:
        """Takes rows, which come in the order of their positions.

        Raises:
            InvalidInput: an unknown kind, a wrong shape or dtype, rows out of order, or values out of range.
        """
        name, first, tensor = rows.name, rows.first_position, rows.tensor
        if self._prompt_positions is None:
            raise InvalidInput("header", "must come before the rows")
        if name not in self._next:
            raise InvalidInput("rows.name", f"'{name}' is not read; this talker reads {sorted(self._next)}")
        if tensor.dim() == 0 or first < self._next[name]:
            raise InvalidInput(name, f"rows from position {first} come after {self._next[name]}")
        self._next[name] = first + len(tensor)
        if name == TOKEN_IDS:
            self._add_tokens(first, tensor)
        elif name == ROPE_POSITIONS:
            self._add_rope(first, tensor)
        else:
            _check(name, tensor, (self._spec.state_width,), is_float=True)
            if first < self._prompt_positions:
                self._add_states(first, tensor)

    def _add_tokens(self, first_position: int, rows: torch.Tensor) -> None:
        assert self._prompt_positions is not None
        _check(TOKEN_IDS, rows, (), is_float=False)
        if first_position != len(self._prompt) + self._taken + len(self._answer):
            raise InvalidInput(TOKEN_IDS, f"positions before {first_position} are missing")
        ids = rows.tolist()
        if ids and not (min(ids) >= 0 and max(ids) < self._text_vocab):
            raise InvalidInput(TOKEN_IDS, f"must be 0 to {self._text_vocab - 1}")
        room = self._prompt_positions - len(self._prompt)
        self._prompt += ids[:room]
        self._answer += ids[room:]

    def _add_rope(self, first_position: int, rows: torch.Tensor) -> None:
        _check(ROPE_POSITIONS, rows, (3,), is_float=False)
        rows = rows.clone()  # the thinker may use its memory again: what is checked must stay so
        if first_position != sum(map(len, self._rope)):
            raise InvalidInput(ROPE_POSITIONS, f"positions before {first_position} are missing")
        if len(rows) and not (rows.min() >= 0 and rows.max() <= _MOST_ROPE_POSITION):
            raise InvalidInput(ROPE_POSITIONS, f"must be 0 to {_MOST_ROPE_POSITION}")
        self._rope.append(rows)

    def _add_states(self, first_position: int, rows: torch.Tensor) -> None:
        """Keeps the rows of media positions; a producer may send others between them. Token ids come first."""
        if len(self._prompt) < first_position + len(rows):
            raise InvalidInput(self._spec.states, "rows came before the token ids of their positions")
        ids = torch.tensor(self._prompt[first_position : first_position + len(rows)])
        media = is_media(ids, self._spec)
        self._states.append(rows if media.all() else rows[media])

    @property
    def ready(self) -> bool:
        """Whether speech can start: the whole prompt, its media states and the first text token are here."""
        if self._prompt_positions is None or len(self._prompt) < self._prompt_positions or not self._answer:
            return False
        ids = torch.tensor(self._prompt)
        if sum(map(len, self._states)) < int(is_media(ids, self._spec).sum()):
            return False
        return not self._has_vision() or sum(map(len, self._rope)) >= self._prompt_positions

    @property
    def is_empty(self) -> bool:
        """Whether the prompt is complete and nothing was answered to it."""
        return len(self._prompt) == self._prompt_positions and not self._answer and not self._taken

    def _has_vision(self) -> bool:
        return not self._spec.vision_ids.isdisjoint(self._prompt)

    def take_prompt(self) -> Prompt:
        """The prompt, once `ready`. Its states are kept here no longer: they may be the thinker's memory.

        Raises:
            InvalidInput: the rows do not fit together.
        """
        states, self._states = self._states, []
        ids = torch.tensor(self._prompt)
        self._head = answer_head(ids, self._spec)
        prompt = ThinkerPrompt(ids, tuple(states), torch.cat(self._rope) if self._has_vision() else None)
        return talker_prompt(prompt, [*self._head, *self._answer][0], self._speaker, self._spec)

    def take_text(self) -> Text:
        """Text of the answer that came since the last call; at first also what the prompt puts at its beginning."""
        text = [*self._head, *self._answer]
        self._taken += len(self._answer)
        self._head, self._answer = [], []
        return Text(text)


def _check(name: str, rows: torch.Tensor, tail: tuple[int, ...], is_float: bool) -> None:
    if tuple(rows.shape[1:]) != tail or rows.is_floating_point() != is_float:
        kind = "a float dtype" if is_float else "integers"
        raise InvalidInput(name, f"must have shape (positions, {', '.join(map(str, tail))}) of {kind}")
