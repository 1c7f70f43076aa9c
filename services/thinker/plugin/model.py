"""vLLM's Qwen3-Omni thinker, keeping the states that a talker reads."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerDummyInputsBuilder,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from services.thinker.plugin import store
from services.thinker.plugin.connector import settings_of
from services.thinker.plugin.hearing import encode_sounds
from services.thinker.plugin.processor import ExactAudioProcessor


@MULTIMODAL_REGISTRY.register_processor(
    ExactAudioProcessor, info=Qwen3OmniMoeThinkerProcessingInfo, dummy_inputs=Qwen3OmniMoeThinkerDummyInputsBuilder
)
class RecordingThinker(Qwen3OmniMoeThinkerForConditionalGeneration):
    """Writes the auxiliary hidden states and the M-RoPE positions of every token to the process's RowStore.

    Without our connector in the config it is its base class.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        text_config = vllm_config.model_config.hf_config.thinker_config.text_config
        if not hasattr(text_config, "tie_word_embeddings"):  # transformers 5 gives it no default, vLLM reads it
            text_config.tie_word_embeddings = False
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        settings = settings_of(vllm_config)
        self._records = settings is not None
        if settings is None:
            return
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("hidden states cannot be kept with pipeline_parallel_size > 1")
        self.set_aux_hidden_state_layers(settings.layers)
        self._slots_of_layer: str | None = None

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
        slots = self._slots()
        if slots is not None and (rows := store.installed()) is not None:
            rows.write(slots, states, positions)
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

    def _slots(self) -> torch.Tensor | None:
        """KV slot of each token of the batch, or None in a run without a KV cache (memory profiling)."""
        mapping = get_forward_context().slot_mapping
        if not isinstance(mapping, dict):
            raise ValueError("hidden states cannot be kept with micro-batching (enable_dbo)")
        if not mapping:
            return None
        # All layers of the language model are in one KV cache group and share their slots.
        if self._slots_of_layer is None:
            self._slots_of_layer = next(iter(mapping))
        return mapping[self._slots_of_layer]
