"""Collects what a thinker sends, in whatever order its kinds of rows arrive."""

import torch

from services.common.rpc.errors import InvalidInput
from services.talker.prompt import ThinkerPrompt, is_media
from services.talker.spec import TalkerSpec

TOKEN_IDS = "token_ids"
ROPE_POSITIONS = "rope_positions"
_MOST_ROPE_POSITION = torch.iinfo(torch.int32).max


class ThinkerInput:
    """Rows of one request, up to the point where its prompt can be spoken from, and its text from there on.

    Args:
        spec: of the talker.
        text_ids: size of the text vocabulary.
    """

    def __init__(self, spec: TalkerSpec, text_ids: int) -> None:
        self.hidden_states = f"hidden_states.{spec.accept_hidden_layer}"
        self._spec, self._text_ids = spec, text_ids
        self._prompt_positions: int | None = None
        self._prompt: list[int] = []
        self._answer: list[int] = []
        self._rope: list[torch.Tensor] = []
        self._states: list[torch.Tensor] = []
        self._next = {TOKEN_IDS: 0, ROPE_POSITIONS: 0, self.hidden_states: 0}
        self._taken = 0

    def begin(self, prompt_positions: int) -> None:
        """The stream's header.

        Raises:
            InvalidInput: there is no prompt.
        """
        if prompt_positions < 1:
            raise InvalidInput("header.prompt_positions", "must be at least 1")
        self._prompt_positions = prompt_positions

    def add(self, name: str, first_position: int, rows: torch.Tensor) -> None:
        """Rows of kind `name` for the positions from `first_position` on.

        Raises:
            InvalidInput: an unknown kind, a wrong shape or dtype, rows out of order, or values out of range.
        """
        if self._prompt_positions is None:
            raise InvalidInput("header", "must come before the rows")
        if name not in self._next:
            raise InvalidInput("rows.name", f"'{name}' is not read; this talker reads {sorted(self._next)}")
        if rows.dim() == 0 or first_position < self._next[name]:
            raise InvalidInput(name, f"rows from position {first_position} come after {self._next[name]}")
        self._next[name] = first_position + len(rows)
        if name == TOKEN_IDS:
            self._add_tokens(first_position, rows)
        elif name == ROPE_POSITIONS:
            self._check(name, rows, (3,), is_float=False)
            rows = rows.clone()  # the thinker may use its memory again: what is checked must stay so
            if first_position != sum(map(len, self._rope)):
                raise InvalidInput(name, f"positions before {first_position} are missing")
            if len(rows) and not (rows.min() >= 0 and rows.max() <= _MOST_ROPE_POSITION):
                raise InvalidInput(name, f"must be 0 to {_MOST_ROPE_POSITION}")
            self._rope.append(rows)
        else:
            self._check(name, rows, (self._spec.thinker_hidden,), is_float=True)
            if first_position < self._prompt_positions:
                self._add_states(first_position, rows)

    def _add_tokens(self, first_position: int, rows: torch.Tensor) -> None:
        assert self._prompt_positions is not None
        self._check(TOKEN_IDS, rows, (), is_float=False)
        if first_position != len(self._prompt) + self._taken + len(self._answer):
            raise InvalidInput(TOKEN_IDS, f"positions before {first_position} are missing")
        ids = rows.tolist()
        if ids and not (min(ids) >= 0 and max(ids) < self._text_ids):
            raise InvalidInput(TOKEN_IDS, f"must be 0 to {self._text_ids - 1}")
        room = self._prompt_positions - len(self._prompt)
        self._prompt += ids[:room]
        self._answer += ids[room:]

    def _add_states(self, first_position: int, rows: torch.Tensor) -> None:
        """Keeps the rows of media positions; a producer may send others between them. Token ids come first."""
        if len(self._prompt) < first_position + len(rows):
            raise InvalidInput(self.hidden_states, "rows came before the token ids of their positions")
        ids = torch.tensor(self._prompt[first_position : first_position + len(rows)])
        media = is_media(ids, self._spec)
        self._states.append(rows if media.all() else rows[media])

    def _check(self, name: str, rows: torch.Tensor, tail: tuple[int, ...], is_float: bool) -> None:
        if tuple(rows.shape[1:]) != tail or rows.is_floating_point() != is_float:
            kind = "a float dtype" if is_float else "integers"
            raise InvalidInput(name, f"must have shape (positions, {', '.join(map(str, tail))}) of {kind}")

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

    def take_prompt(self) -> ThinkerPrompt:
        """The prompt, once `ready`. Its states are kept here no longer: they may be the thinker's memory."""
        states, self._states = self._states, []
        return ThinkerPrompt(
            token_ids=torch.tensor(self._prompt),
            media_states=tuple(states),
            rope_positions=torch.cat(self._rope) if self._has_vision() else None,
        )

    def take_text(self) -> list[int]:
        """Text of the answer that came since the last call."""
        text, self._answer = self._answer, []
        self._taken += len(text)
        return text
