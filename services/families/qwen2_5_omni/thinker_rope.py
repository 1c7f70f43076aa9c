"""Positions of a prompt's tokens in time, height and width (TMRoPE).

Source: transformers' `Qwen2_5OmniThinkerForConditionalGeneration.get_rope_index`, which differs from vLLM for a video
with sound.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Medium:
    """An image, a sound, or a video with or without sound.

    Attributes:
        begin: index of its first token; of a video with sound, one less.
        sound_frames: spectrogram frames.
        grid: time, height and width in image tokens.
        positions_per_frame: rope positions in time between frames of the grid.
    """

    begin: int
    sound_frames: int | None
    grid: tuple[int, int, int] | None
    positions_per_frame: float


def rope_positions(
    token_ids: Sequence[int], media: Sequence[Medium], video_token_id: int, audio_token_id: int
) -> torch.Tensor:
    """Positions of a prompt's tokens, (3, tokens) int64: time, height, width.

    Args:
        token_ids: with a placeholder for each token of a medium.
        media: in order.
        video_token_id, audio_token_id: the placeholders.
    """
    ids, positions, following = torch.tensor(token_ids), torch.empty(3, len(token_ids), dtype=torch.int64), 0
    end = 0  # tokens before it have positions; the next text begins at `following`
    for medium in media:
        begin = medium.begin
        positions[:, end:begin] = torch.arange(following, following + begin - end)
        following += begin - end
        if medium.grid is None:
            end = begin + _sound_tokens(medium.sound_frames or 0)
            positions[:, begin:end] = torch.arange(following, following + end - begin)
            following += end - begin
        elif medium.sound_frames is None:
            image = _image(medium) + following
            end = begin + image.shape[1]
            positions[:, begin:end] = image
            following = int(image.max()) + 1
        else:
            positions[:, begin] = following - 1
            image, sound = _image(medium), torch.arange(_sound_tokens(medium.sound_frames))
            end = begin + 1 + image.shape[1] + len(sound)
            inside = ids[begin + 1 : end]
            positions[:, begin + 1 : end][:, inside == video_token_id] = image + following
            positions[:, begin + 1 : end][:, inside == audio_token_id] = sound + following
            last = int(torch.nonzero(inside != inside[-1]).max()) + 1  # of one kind from here on
            following = int(positions[:, begin + 1 + last : end].max()) + 1
            positions[:, end : end + 2] = following
            following, end = following + 1, end + 2
    positions[:, end:] = torch.arange(following, following + len(token_ids) - end)
    return positions


def _sound_tokens(frames: int) -> int:
    """Tokens of a sound: the convolution and the pooling each halve its frames."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def _image(medium: Medium) -> torch.Tensor:
    """Positions of the grid's tokens from 0 on, (3, tokens) int64."""
    assert medium.grid is not None
    times, height, width = medium.grid
    grid = torch.stack(torch.meshgrid(torch.arange(times), torch.arange(height), torch.arange(width), indexing="ij"))
    grid[0] = (grid[0].float() * medium.positions_per_frame).long()
    return grid.flatten(1)
