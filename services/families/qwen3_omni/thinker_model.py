"""vLLM's Qwen3-Omni thinker, keeping the states that a talker reads, and hearing what transformers hears."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerDummyInputsBuilder,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from services.families.qwen3_omni.thinker_audio import ExactAudioProcessor, encode_sounds
from services.thinker.plugin.recording import Recorder
from services.thinker.plugin.rows import layers_of


@MULTIMODAL_REGISTRY.register_processor(
    ExactAudioProcessor, info=Qwen3OmniMoeThinkerProcessingInfo, dummy_inputs=Qwen3OmniMoeThinkerDummyInputsBuilder
)
class RecordingThinker(Recorder, Qwen3OmniMoeThinkerForConditionalGeneration):
    """Keeps auxiliary hidden states and the M-RoPE positions of every token.

    Without our connector in the config it is its base class.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        text_config = vllm_config.model_config.hf_config.thinker_config.text_config
        if not hasattr(text_config, "tie_word_embeddings"):  # transformers 5 gives it no default, vLLM reads it
            text_config.tie_word_embeddings = False
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        settings = self.recording(vllm_config)
        self._records = settings is not None
        if settings:
            self.set_aux_hidden_state_layers(layers_of(settings.kinds))

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
        hidden, states = output
        self.record([*states, positions.t()])
        return hidden

    def _process_audio_input(self, audio_input: Any) -> tuple[torch.Tensor, ...]:
        lengths = audio_input["audio_feature_lengths"].flatten()
        tower: Any = self.audio_tower
        encoded = encode_sounds(
            tower,
            audio_input["input_features"],
            lengths.tolist(),
            [mask.shape[-1] for mask in audio_input["feature_attention_mask"]],
            [self._compute_audio_token_count(length) for length in lengths.tolist()],
            chunk_frames=2 * tower.n_window,
        )
        return tuple(encoded)
