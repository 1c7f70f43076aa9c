"""The talker's input from a thinker: the rows of an answer, and the prompt before the first frame."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quartet.v1 import stream_pb2
from services.common.errors import InvalidInput
from services.common.stream.rows import hidden_states
from services.talker.answer import AnswerRows, id_list
from services.talker.inputs import Prompt, States, Text

# Rows of the assistant's part. Source: the reference's `_get_talker_assistant_parts`.
ASSISTANT_HEADER = 3  # <|im_start|>, assistant, newline
_TTS_PADS = 4
_ASSISTANT_ROWS = ASSISTANT_HEADER + _TTS_PADS + 2  # and tts_bos, and the first text token


class PromptSpec:
    """Ids and sizes of a Qwen3OmniMoeConfig. `codec_*` and speakers are codes, other ids are text.

    Attributes:
        states: `Rows.name` of the media's states.
        codec_prefix: codes before the speaker's.
    """

    def __init__(self, config: Any) -> None:
        talker, thinker = config.talker_config, config.thinker_config
        self.state_layer: int = talker.accept_hidden_layer
        self.states = hidden_states(self.state_layer)
        self.state_width: int = talker.thinker_hidden_size
        self.im_start_id: int = config.im_start_token_id
        self.im_end_id: int = config.im_end_token_id
        self.user_id: int = config.user_token_id
        self.assistant_id: int = config.assistant_token_id
        self.vision_ids: frozenset[int] = frozenset({thinker.image_token_id, thinker.video_token_id})
        self.media_ids: frozenset[int] = self.vision_ids | {thinker.audio_token_id}
        self.vision_start_id: int = talker.vision_start_token_id
        self.audio_start_id: int = talker.audio_start_token_id
        self.tts_bos_id: int = config.tts_bos_token_id
        self.tts_pad_id: int = config.tts_pad_token_id
        self.codec_prefix = (talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id)
        self.codec_pad_id: int = talker.codec_pad_id
        self.codec_bos_id: int = talker.codec_bos_id
        self.speaker_ids: Mapping[str, int] = talker.speaker_id


@dataclass(frozen=True)
class ThinkerPrompt:
    """A thinker's prompt, on the CPU.

    Attributes:
        token_ids: (positions,) int64.
        media_states: pieces of (media, state_width), in order. They may be the thinker's memory.
        rope_positions: the thinker's (positions, 3), or None without images and videos.
    """

    token_ids: torch.Tensor
    media_states: tuple[torch.Tensor, ...]
    rope_positions: torch.Tensor | None


def is_media(token_ids: torch.Tensor, spec: PromptSpec) -> torch.Tensor:
    """Which positions an encoder filled: bool, the shape of `token_ids`."""
    return torch.isin(token_ids, torch.tensor(sorted(spec.media_ids)))


def user_positions(token_ids: torch.Tensor, spec: PromptSpec) -> torch.Tensor:
    """Positions of all user turns, ascending: (kept,) int64. A turn ends at the next `<|im_start|>`."""
    starts = torch.where(token_ids == spec.im_start_id, torch.arange(len(token_ids)), -1)
    roles = (starts.cummax(dim=0).values.clamp_min(0) + 1).clamp_max(len(token_ids) - 1)
    return torch.nonzero(token_ids[roles] == spec.user_id).flatten()


def answer_head(token_ids: torch.Tensor, spec: PromptSpec) -> list[int]:
    """Text of the prompt after the header of the assistant's turn.

    Raises:
        InvalidInput: the prompt does not end in an assistant turn.
    """
    starts = (token_ids[:-1] == spec.im_start_id) & (token_ids[1:] == spec.assistant_id)
    if not starts.any():
        raise InvalidInput("token_ids", "the prompt has no assistant turn to speak")
    begin = int(torch.nonzero(starts)[-1])
    if len(token_ids) < begin + ASSISTANT_HEADER:
        raise InvalidInput("token_ids", "the prompt ends within the header of the assistant's turn")
    return id_list(token_ids[begin + ASSISTANT_HEADER :])


def rope_positions(prompt: ThinkerPrompt, spec: PromptSpec) -> torch.Tensor:
    """Rope positions of the talker's rows: (rows, 3) int64.

    They equal the reference's `get_rope_index` of the kept ids. Only text is dropped, so a kept stretch has the
    thinker's positions, shifted to follow the one before. As in the reference, a video with sound counts as text unless
    an image or plain video follows.
    """
    kept = user_positions(prompt.token_ids, spec)
    ids = id_list(prompt.token_ids[kept])
    pieces: list[torch.Tensor] = []
    if any(token in spec.vision_ids for token in ids):
        if prompt.rope_positions is None:
            raise InvalidInput("rope_positions", "is required for a prompt with an image or a video")
        thinker, following = prompt.rope_positions[kept].long(), 0
        for begin, end, linear in _stretches(id_list(kept), ids, spec):
            piece = torch.arange(end - begin)[:, None].expand(-1, 3) if linear else thinker[begin:end]
            pieces.append(piece - piece.min() + following)
            following = int(pieces[-1].max()) + 1
    else:
        following = len(kept)
        pieces.append(torch.arange(following)[:, None].expand(-1, 3))
    pieces.append(torch.arange(following, following + _ASSISTANT_ROWS)[:, None].expand(-1, 3))
    return torch.cat(pieces)


def _stretches(kept: list[int], ids: list[int], spec: PromptSpec) -> list[tuple[int, int, bool]]:
    """Cuts the kept rows into (begin, end, linear) at dropped turns and changes of rope rules."""
    openings = [i for i in range(len(ids) - 1) if ids[i] == spec.vision_start_id]
    vision_left = sum(ids[i + 1] in spec.vision_ids for i in openings)
    cuts = {0: False, **{i: False for i in range(1, len(kept)) if kept[i] != kept[i - 1] + 1}}
    for opening in openings:
        if ids[opening + 1] in spec.vision_ids:
            vision_left -= 1
        elif ids[opening + 1] == spec.audio_start_id and vision_left <= 0:
            end = opening + 2
            while end < len(ids) and ids[end] in spec.media_ids:
                end += 1
            cuts.update({opening: True, end: False})
    begins = sorted(begin for begin in cuts if begin < len(ids))
    return [(begin, end, cuts[begin]) for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True)]


def talker_prompt(prompt: ThinkerPrompt, first_text_id: int, speaker: str, spec: PromptSpec) -> Prompt:
    """All user turns, then the assistant's turn up to the first text token.

    Raises:
        InvalidInput: the prompt's rows do not fit together.
    """
    head = answer_head(prompt.token_ids, spec)
    is_state = is_media(prompt.token_ids, spec)
    rows, media_rows = sum(map(len, prompt.media_states)), int(is_state.sum())
    if rows != media_rows or any(states.shape[1:] != (spec.state_width,) for states in prompt.media_states):
        raise InvalidInput(spec.states, f"has {rows} rows, the prompt needs {media_rows} of {spec.state_width}")
    kept = user_positions(prompt.token_ids, spec)
    ids, media = prompt.token_ids[kept], torch.nonzero(is_state[kept]).flatten()
    picked = (is_state.cumsum(dim=0) - 1)[kept[media]]  # position -> row of media_states
    header_begin = len(prompt.token_ids) - len(head) - ASSISTANT_HEADER
    header = id_list(prompt.token_ids[header_begin : header_begin + ASSISTANT_HEADER])
    assistant = [*header, *[spec.tts_pad_id] * _TTS_PADS, spec.tts_bos_id, first_text_id]
    codes = [*spec.codec_prefix, spec.speaker_ids[speaker], spec.codec_pad_id, spec.codec_bos_id]
    return Prompt(
        text_ids=torch.cat((ids.index_fill(0, media, -1), torch.tensor(assistant))),
        codes=torch.tensor([-1] * (len(kept) + ASSISTANT_HEADER) + codes),
        positions=rope_positions(prompt, spec),
        states=States(spec.states, prompt.media_states, picked, media) if len(media) else None,
    )


class AnswerInput(AnswerRows):
    """Keeps only the states of media."""

    def __init__(self, spec: PromptSpec, text_vocab: int, speaker: str) -> None:
        super().__init__(spec.states, spec.state_width, stream_pb2.POSITIONS_PROMPT_MULTIMODAL, text_vocab)
        self._spec, self._speaker = spec, speaker
        self._head: list[int] = []
        self._media: list[torch.Tensor] = []

    def _add_states(self, first: int, expected: int, rows: torch.Tensor, prompt_positions: int) -> None:
        """Keeps the rows of the prompt's media positions."""
        if first >= prompt_positions:
            return
        if len(self.prompt) < first + len(rows):
            raise InvalidInput(self._spec.states, "rows came before the token ids of their positions")
        media = is_media(torch.tensor(self.prompt[first : first + len(rows)]), self._spec)
        self._media.append(rows if media.all() else rows[media])

    @property
    def ready(self) -> bool:
        """Whether the prompt, its media states and the first text token are here."""
        if not self.has_prompt_ids or not self.answer:
            return False
        if sum(map(len, self._media)) < int(is_media(torch.tensor(self.prompt), self._spec).sum()):
            return False
        return not self._has_vision() or self.has_prompt_rope

    def _has_vision(self) -> bool:
        return not self._spec.vision_ids.isdisjoint(self.prompt)

    def take_prompt(self) -> Prompt:
        """Also drops the states, which may be the thinker's memory. Raises InvalidInput: rows do not fit together."""
        states, self._media = self._media, []
        ids = torch.tensor(self.prompt)
        self._head = answer_head(ids, self._spec)
        prompt = ThinkerPrompt(ids, tuple(states), torch.cat(self.rope) if self._has_vision() else None)
        return talker_prompt(prompt, [*self._head, *self.answer][0], self._speaker, self._spec)

    def take_text(self) -> Text:
        """Text since the last call, first with the answer's beginning in the prompt."""
        text = [*self._head, *self.answer]
        self._head, self.answer = [], []
        return Text(text)
