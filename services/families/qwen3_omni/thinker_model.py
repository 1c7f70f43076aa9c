"""vLLM's Qwen3-Omni thinker. It records states for a talker, and encodes sounds as transformers does."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerMultiModalProcessor
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerDummyInputsBuilder,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerMultiModalProcessor,
    Qwen3OmniMoeThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from services.thinker.plugin.connector import settings_of
from services.thinker.plugin.media_order import in_token_order
from services.thinker.plugin.recording import experts_without_adapters, record
from services.thinker.plugin.rows import layers_of


class ExactAudioProcessor(Qwen3OmniMoeThinkerMultiModalProcessor):
    """Extracts transformers' audio features, from all sounds of a request unpadded.

    vLLM pads each sound to whole hops, which changes the last frame and, for one length in eight, the number of tokens.
    These features depend on the longest sound, so the caller must give distinct `multi_modal_uuids` and use no cache.
    """

    _get_hf_mm_inputs: Any = Qwen2_5OmniThinkerMultiModalProcessor._get_hf_mm_inputs
    _postprocess_hf_mm_data: Any = Qwen2_5OmniThinkerMultiModalProcessor._postprocess_hf_mm_data


@MULTIMODAL_REGISTRY.register_processor(
    ExactAudioProcessor, info=Qwen3OmniMoeThinkerProcessingInfo, dummy_inputs=Qwen3OmniMoeThinkerDummyInputsBuilder
)
class RecordingThinker(Qwen3OmniMoeThinkerForConditionalGeneration):
    """Records auxiliary hidden states and M-RoPE positions. Without our connector it equals its base class."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        text_config = vllm_config.model_config.hf_config.thinker_config.text_config
        if not hasattr(text_config, "tie_word_embeddings"):  # vLLM reads it; transformers 5 has no default
            text_config.tie_word_embeddings = False
        with experts_without_adapters(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        settings = settings_of(vllm_config)
        self._records = settings is not None
        self._layers = layers_of(settings.kinds) if settings else ()
        self.set_aux_hidden_state_layers(self._layers)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> Any:
        output: Any = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        if not self._records:
            return output
        hidden, states = output if self._layers else (output, ())
        record([*states, positions.t()])
        return hidden

    def embed_input_ids(
        self, input_ids: torch.Tensor, multimodal_embeddings: Any = None, *, is_multimodal: torch.Tensor | None = None
    ) -> torch.Tensor:
        if multimodal_embeddings and is_multimodal is not None:
            modalities = {
                self.config.video_token_id: "video",
                self.config.audio_token_id: "audio",
                self.config.image_token_id: "image",
            }
            multimodal_embeddings = in_token_order(multimodal_embeddings, input_ids, is_multimodal, modalities)
        return super().embed_input_ids(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)

    def _process_audio_input(self, audio_input: Any) -> tuple[torch.Tensor, ...]:
        """Encodes each sound as transformers does with all sounds of its request.

        The encoder pads chunks to the longest in the batch, which changes shorter ones. So sounds are grouped by their
        own request's padding, and a silent chunk replaces a missing longest one.

        Args:
            audio_input: vLLM's: spectrograms joined (mel bins, sum of lengths), lengths (n,), and for each sound a mask
                as long as its request's longest.

        Returns:
            Embeddings of each sound, (tokens, hidden size).
        """
        tower: Any = self.audio_tower
        features, lengths = audio_input["input_features"], audio_input["audio_feature_lengths"].flatten().tolist()
        sounds = features.split(lengths, dim=1)
        groups: dict[int, list[int]] = {}
        for i, mask in enumerate(audio_input["feature_attention_mask"]):
            groups.setdefault(min(mask.shape[-1], 2 * tower.n_window), []).append(i)
        encoded: dict[int, torch.Tensor] = {}
        for padded_frames, members in groups.items():
            batch = [sounds[i] for i in members]
            out = [self._compute_audio_token_count(lengths[i]) for i in members]
            if all(sound.shape[1] < padded_frames for sound in batch):
                batch.append(features.new_zeros(features.shape[0], padded_frames))
                out.append(-(-padded_frames // 8))  # three convolutions of stride 2
            outputs = tower(
                torch.cat(batch, dim=1).to(tower.dtype),
                feature_lens=torch.tensor([sound.shape[1] for sound in batch], device=features.device),
                aftercnn_lens=torch.tensor(out, device=features.device),
            )
            encoded |= zip(members, outputs.split(out), strict=False)
        return tuple(encoded[i] for i in range(len(sounds)))
