"""The talker's input from a thinker: the text and its state at every position of prompt and answer."""

from collections.abc import Mapping
from typing import Any

import torch

from quartet.v1 import stream_pb2
from services.common.errors import InvalidInput
from services.common.stream.rows import hidden_states
from services.talker.answer import AnswerRows
from services.talker.inputs import Prompt, States, Text


class PromptSpec:
    """Ids and sizes of a checkpoint's prompts.

    Attributes:
        states: `Rows.name` of the states after the thinker's last norm.
        media_ids: text ids of encoder positions, which have only a state.
        voice_ids: text id of each voice.
    """

    def __init__(self, config: dict[str, Any], voice_ids: Mapping[str, int]) -> None:
        thinker, talker = config["thinker_config"], config["talker_config"]
        self.states = hidden_states(thinker["text_config"]["num_hidden_layers"])
        self.state_width: int = thinker["text_config"]["hidden_size"]
        self.media_ids = [thinker[f"{kind}_token_index"] for kind in ("image", "audio", "video")]
        self.codec_pad_id: int = talker["tts_codec_pad_token_id"]
        self.codec_bos_id: int = talker["tts_codec_start_token_id"]
        self.voice_ids = voice_ids


class AnswerInput(AnswerRows):
    """Speaks the tokens that have a state.

    As in transformers' `generate`, the last token of an answer cut by its length has none.
    """

    def __init__(self, spec: PromptSpec, text_vocab: int, speaker: str) -> None:
        super().__init__(spec.states, spec.state_width, stream_pb2.POSITIONS_ALL, text_vocab)
        self._spec, self._voice_id = spec, spec.voice_ids[speaker]
        self._prompt_states: list[torch.Tensor] = []
        self._answer_states: list[torch.Tensor] = []
        self._has_answer = False  # whether the answer has had a state

    def _add_states(self, first: int, expected: int, rows: torch.Tensor, prompt_positions: int) -> None:
        if first != expected:
            raise InvalidInput(self._spec.states, f"positions before {first} are missing")
        if self.tokens + len(self.prompt) < first + len(rows):
            raise InvalidInput(self._spec.states, "rows came before the token ids of their positions")
        of_prompt = max(0, prompt_positions - first)
        self._prompt_states += [rows[:of_prompt]] if of_prompt else []
        of_answer = rows[of_prompt:]
        if len(of_answer):
            if not of_answer.isfinite().all():  # they would spoil the talker's cache
                raise InvalidInput(self._spec.states, "must be finite numbers")
            self._answer_states += of_answer.clone().unbind()  # the thinker may reuse its memory
            self._has_answer = True

    @property
    def ready(self) -> bool:
        """Whether the whole prompt with its states, and the answer's first state, are here."""
        return self.has_prompt_ids and self.has_prompt_rope and bool(self._answer_states)

    @property
    def is_empty(self) -> bool:
        """Whether the prompt is complete and its answer has no states."""
        return self.has_prompt_ids and not self._has_answer

    def take_prompt(self) -> Prompt:
        """The rows of the thinker's prompt, the voice and the answer's first token, once `ready`."""
        pieces, self._prompt_states = [*self._prompt_states, self._answer_states[0][None]], []
        ids = torch.tensor(self.prompt)
        text = ids.masked_fill(torch.isin(ids, torch.tensor(self._spec.media_ids)), -1)
        places = torch.arange(len(ids) + 1)
        places[-1] += 1  # the voice's row has no state
        rope = torch.cat(self.rope)[: len(ids)].long()
        following = int(rope.max()) + 1 + torch.arange(2)[:, None].expand(-1, 3)
        return Prompt(
            text_ids=torch.cat((text, torch.tensor([self._voice_id, self.answer[0]]))),
            codes=torch.tensor([-1] * len(ids) + [self._spec.codec_pad_id, self._spec.codec_bos_id]),
            positions=torch.cat((rope, following)),
            states=States(self._spec.states, pieces, torch.arange(len(ids) + 1), places),
        )

    def take_text(self) -> Text:
        """Tokens whose states came since the last call."""
        states, self._answer_states = self._answer_states, []
        ids, self.answer = self.answer[: len(states)], self.answer[len(states) :]
        return Text(ids, torch.stack(states) if states else None)
