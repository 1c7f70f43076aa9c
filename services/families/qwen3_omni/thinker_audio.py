"""How the thinker hears: as transformers does, whatever else is in its batch. Imports vLLM."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerMultiModalProcessor


class ExactAudioProcessor(Qwen3OmniMoeThinkerMultiModalProcessor):
    """Hears what transformers hears.

    vLLM pads each sound to whole hops of the spectrogram so that sounds can be cached one by one; that changes the last
    frame and, for one length in eight, the number of tokens. Here the feature extractor gets all sounds of a request as
    they are, and its own mask says how long they are. Such features depend on the longest sound of the request, so the
    caller must tell vLLM's caches apart what differs in that (`multi_modal_uuids`) and process without a cache.
    """

    def _get_hf_mm_inputs(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        return super(Qwen3OmniMoeThinkerMultiModalProcessor, self)._get_hf_mm_inputs(mm_items, hf_kwargs)

    def _postprocess_hf_mm_data(
        self, mm_data: Mapping[str, object], hf_processor_mm_kwargs: Mapping[str, object], processed_data: Any
    ) -> Any:
        return super(Qwen3OmniMoeThinkerMultiModalProcessor, self)._postprocess_hf_mm_data(
            mm_data, hf_processor_mm_kwargs, processed_data
        )


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
