"""The audio encoder, independent of what else is in its batch."""

from collections.abc import Sequence
from typing import Any

import torch


def encode_sounds(
    tower: Any,
    features: torch.Tensor,
    lengths: Sequence[int],
    longest: Sequence[int],
    output_lengths: Sequence[int],
    chunk_frames: int,
) -> list[torch.Tensor]:
    """Encodes each sound as transformers does with all sounds of its request, and no others.

    The encoder pads its chunks to the longest chunk in the batch, which changes the end of shorter ones: the
    convolutions see the padding. vLLM batches the sounds of several requests, and leaves out those it has cached; so
    sounds are grouped here by the padding that they get in their own request, and a chunk of silence stands in for
    the one that brought it where that is not in the group.

    Args:
        tower: vLLM's Qwen3OmniMoeAudioEncoder.
        features: (mel bins, sum of lengths), the spectrograms one after the other.
        lengths: frames of each sound.
        longest: frames of the longest sound in the request of each.
        output_lengths: embeddings of each sound.
        chunk_frames: frames of a whole chunk.

    Returns:
        for each sound (output_length, hidden size).
    """
    sounds = features.split(list(lengths), dim=1)
    groups: dict[int, list[int]] = {}
    for i, frames in enumerate(longest):
        groups.setdefault(min(frames, chunk_frames), []).append(i)
    encoded: list[torch.Tensor] = [features] * len(sounds)
    for padded_frames, members in groups.items():
        batch = [sounds[i] for i in members]
        out = [output_lengths[i] for i in members]
        if all(sound.shape[1] < padded_frames for sound in batch):
            batch.append(features.new_zeros(features.shape[0], padded_frames))
            out.append(-(-padded_frames // 8))  # three convolutions of stride 2
        outputs = tower(
            torch.cat(batch, dim=1).to(tower.dtype),
            feature_lens=torch.tensor([sound.shape[1] for sound in batch], device=features.device),
            aftercnn_lens=torch.tensor(out, device=features.device),
        )
        for i, output in zip(members, outputs.split(out), strict=False):
            encoded[i] = output
    return encoded
