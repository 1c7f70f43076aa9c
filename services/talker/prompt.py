"""What the talker reads before its first frame: which of the thinker's prompt, as which rows, where in the rope."""

from dataclasses import dataclass

import torch

from services.common.engine.device import Staging
from services.common.rpc.errors import InvalidInput
from services.talker.model import TalkerModel
from services.talker.spec import TalkerSpec

# Rows of the assistant part, and how many of them carry tts_pad. Source: the reference's `_get_talker_assistant_parts`.
ASSISTANT_HEADER = 3  # <|im_start|>, assistant, newline
_TTS_PADS = 4


@dataclass(frozen=True)
class ThinkerPrompt:
    """A thinker's prompt, on the CPU.

    Attributes:
        token_ids: (positions,) int64.
        media_states: states of `accept_hidden_layer` at the media positions, in order: pieces of
            (media, thinker hidden), which may be the thinker's memory.
        rope_positions: the thinker's own (positions, 3), or None where the prompt has no image or video.
    """

    token_ids: torch.Tensor
    media_states: tuple[torch.Tensor, ...]
    rope_positions: torch.Tensor | None


@dataclass(frozen=True)
class PromptRows:
    """The prefill: `embeddings` (rows, hidden) on the model's device, rope `positions` (rows, 3) int64 on the CPU."""

    embeddings: torch.Tensor
    positions: torch.Tensor


def is_media(token_ids: torch.Tensor, spec: TalkerSpec) -> torch.Tensor:
    """Which positions an encoder filled: bool, the shape of `token_ids`."""
    return torch.isin(token_ids, torch.tensor(sorted(spec.media_ids)))


def user_positions(token_ids: torch.Tensor, spec: TalkerSpec) -> torch.Tensor:
    """Positions of all user turns, ascending: (kept,) int64. Each turn runs from its `<|im_start|>` to the next one."""
    starts = torch.where(token_ids == spec.im_start_id, torch.arange(len(token_ids)), -1)
    roles = (starts.cummax(dim=0).values.clamp_min(0) + 1).clamp_max(len(token_ids) - 1)
    return torch.nonzero(token_ids[roles] == spec.user_id).flatten()


def answer_head(token_ids: torch.Tensor, spec: TalkerSpec) -> list[int]:
    """Text that the prompt puts at the beginning of the answer, after the header of the assistant's turn.

    Raises:
        InvalidInput: the prompt does not end in an assistant turn.
    """
    starts = (token_ids[:-1] == spec.im_start_id) & (token_ids[1:] == spec.assistant_id)
    if not starts.any():
        raise InvalidInput("token_ids", "the prompt has no assistant turn to speak")
    begin = int(torch.nonzero(starts)[-1])
    if len(token_ids) < begin + ASSISTANT_HEADER:
        raise InvalidInput("token_ids", "the prompt ends within the header of the assistant's turn")
    return token_ids[begin + ASSISTANT_HEADER :].tolist()


def prompt_length(prompt: ThinkerPrompt, spec: TalkerSpec) -> int:
    """Positions of the talker that `prompt` takes."""
    return len(user_positions(prompt.token_ids, spec)) + _assistant_rows()


def _assistant_rows() -> int:
    return ASSISTANT_HEADER + _TTS_PADS + 2  # and tts_bos, and the first text token


def rope_positions(prompt: ThinkerPrompt, spec: TalkerSpec) -> torch.Tensor:
    """Rope positions of the talker's rows: (rows, 3) int64.

    The reference computes them anew (`get_rope_index`) on the ids that are kept. What is dropped is text, so each kept
    stretch has the thinker's own positions, moved to begin one past the largest before it. One exception, as in the
    reference, whose talker is not told that the sound of a video is part of it: such a video counts as text unless
    an image or a plain video is still to come.
    """
    kept = user_positions(prompt.token_ids, spec)
    ids = prompt.token_ids[kept].tolist()
    pieces: list[torch.Tensor] = []
    if any(token in spec.vision_ids for token in ids):
        if prompt.rope_positions is None:
            raise InvalidInput("rope_positions", "is required for a prompt with an image or a video")
        thinker, following = prompt.rope_positions[kept].long(), 0
        for begin, end, linear in _stretches(kept.tolist(), ids, spec):
            piece = torch.arange(end - begin)[:, None].expand(-1, 3) if linear else thinker[begin:end]
            pieces.append(piece - piece.min() + following)
            following = int(pieces[-1].max()) + 1
    else:
        following = len(kept)
        pieces.append(torch.arange(following)[:, None].expand(-1, 3))
    pieces.append(torch.arange(following, following + _assistant_rows())[:, None].expand(-1, 3))
    return torch.cat(pieces)


def _stretches(kept: list[int], ids: list[int], spec: TalkerSpec) -> list[tuple[int, int, bool]]:
    """Cuts the kept rows into (begin, end, linear) where a turn was dropped between them, or rope rules change."""
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


@torch.inference_mode()
def prompt_rows(
    prompt: ThinkerPrompt,
    first_text_id: int,
    speaker: str,
    model: TalkerModel,
    positions: torch.Tensor,
    staging: Staging,
) -> PromptRows:
    """Embeds the prompt: all user turns, then the head of the assistant's turn up to the first text token.

    Args:
        prompt: of the thinker.
        first_text_id: first token of the answer.
        speaker: a voice of the checkpoint.
        model: whose embeddings and projections are used.
        positions: of `rope_positions`.
        staging: to the model's device.
    """
    spec, device = model.spec, model.device
    kept = user_positions(prompt.token_ids, spec)
    ids = prompt.token_ids[kept]
    user = model.text_table[ids.to(device)]
    media = is_media(prompt.token_ids, spec)
    kept_media = is_media(ids, spec)
    if kept_media.any():
        order = media.cumsum(dim=0) - 1  # position -> row of media_states
        states = torch.cat(prompt.media_states)[order[kept[kept_media]]]
        user[kept_media.to(device)] = model.hidden_projection(staging.to_device(states).to(model.dtype))

    header_begin = len(prompt.token_ids) - len(answer_head(prompt.token_ids, spec)) - ASSISTANT_HEADER
    header = prompt.token_ids[header_begin : header_begin + ASSISTANT_HEADER].tolist()
    text = [*header, *[spec.tts_pad_id] * _TTS_PADS, spec.tts_bos_id, first_text_id]
    codec = [
        spec.codec_nothink_id,
        spec.codec_think_bos_id,
        spec.codec_think_eos_id,
        spec.speakers[speaker],
        spec.codec_pad_id,
        spec.codec_bos_id,
    ]
    assistant = model.text_table[torch.tensor(text, device=device)]
    assistant[ASSISTANT_HEADER:] += model.model.codec_embedding(torch.tensor(codec, device=device))
    return PromptRows(torch.cat((user, assistant)), positions)
