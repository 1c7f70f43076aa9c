"""Where each token of a prompt is in time, height and width (TMRoPE).

As transformers' `Qwen2_5OmniThinkerForConditionalGeneration.get_rope_index` has it, of which vLLM differs where the
sound of a video is among its frames: the two tokens before them share a position, and so do the two after them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Medium:
    """An image, a sound, or a video with or without its sound.

    Attributes:
        begin: index of its first token; with frames and sound, of the token before them that begins the sound.
        sound_frames: spectrogram frames of its sound; None: it has none.
        grid: of its picture's tokens: time, height, width; None: it has none.
        positions_per_frame: rope positions in time from one of the grid's frames to the next.
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
        media: in the order of their places.
        video_token_id, audio_token_id: the placeholders.
    """
    ids, positions, following = torch.tensor(token_ids), torch.empty(3, len(token_ids), dtype=torch.int64), 0
    end = 0  # of what has its positions; the next text begins at `following`
    for medium in media:
        begin = medium.begin
        positions[:, end:begin] = torch.arange(following, following + begin - end)
        following += begin - end
        if medium.grid is None:
            end = begin + _sound_tokens(medium.sound_frames or 0)
            positions[:, begin:end] = torch.arange(following, following + end - begin)
            following += end - begin
        elif medium.sound_frames is None:
            picture = _picture(medium) + following
            end = begin + picture.shape[1]
            positions[:, begin:end] = picture
            following = int(picture.max()) + 1
        else:
            positions[:, begin] = following - 1
            picture, sound = _picture(medium), torch.arange(_sound_tokens(medium.sound_frames))
            end = begin + 1 + picture.shape[1] + len(sound)
            inside = ids[begin + 1 : end]
            positions[:, begin + 1 : end][:, inside == video_token_id] = picture + following
            positions[:, begin + 1 : end][:, inside == audio_token_id] = sound + following
            last = int(torch.nonzero(inside != inside[-1]).max()) + 1  # of one kind from here on
            following = int(positions[:, begin + 1 + last : end].max()) + 1
            positions[:, end : end + 2] = following
            following, end = following + 1, end + 2
    positions[:, end:] = torch.arange(following, following + len(token_ids) - end)
    return positions


def _sound_tokens(frames: int) -> int:
    """Tokens of a sound: two halvings, of the convolution and of the pooling."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def _picture(medium: Medium) -> torch.Tensor:
    """Positions of the grid's tokens from 0 on, (3, tokens) int64."""
    assert medium.grid is not None
    times, height, width = medium.grid
    grid = torch.stack(torch.meshgrid(torch.arange(times), torch.arange(height), torch.arange(width), indexing="ij"))
    grid[0] = (grid[0].float() * medium.positions_per_frame).long()
    return grid.flatten(1)
