"""Embeddings of media in the order of their tokens."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from vllm.multimodal.utils import copy_mm_embedding_modality, get_mm_embedding_modalities
from vllm.utils.gpu_sync_debug import gpu_sync_allowed


def in_token_order(
    embeddings: Sequence[torch.Tensor],
    input_ids: torch.Tensor,
    is_multimodal: torch.Tensor,
    modalities: Mapping[int, str],
) -> Sequence[torch.Tensor]:
    """The embeddings of a step, cut wherever a video's frames and its sound take turns.

    vLLM has them in the order of the media. It sees that a sound is between frames only where a step has two turns of
    one kind. A step may as well begin in the sound and end in the next frames, or the other way round.

    Args:
        embeddings: of each medium, (its tokens in the step, width), with vLLM's `modality`.
        input_ids: (tokens of the step,).
        is_multimodal: bool, (tokens of the step,), on the CPU: those that have embeddings.
        modalities: of the placeholder tokens.
    """
    kinds = get_mm_embedding_modalities(embeddings)
    if not {"audio", "video"} <= set(kinds):
        return embeddings
    with gpu_sync_allowed():
        ids = input_ids.cpu()[is_multimodal].tolist()
    joined = {kind: [each for each, its in zip(embeddings, kinds, strict=True) if its == kind] for kind in set(kinds)}
    turns = [(modalities[token], len(list(run))) for token, run in groupby(ids)]
    left = {
        kind: iter(torch.cat(parts).split([tokens for its, tokens in turns if its == kind]))
        for kind, parts in joined.items()
    }
    of_kind = {kind: parts[0] for kind, parts in joined.items()}
    return [copy_mm_embedding_modality(of_kind[kind], next(left[kind])) for kind, _ in turns]
