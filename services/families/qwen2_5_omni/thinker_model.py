"""vLLM's Qwen2.5-Omni thinker. It records states for a talker, and places the sound of a video as transformers does."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerMultiModalProcessor,
    Qwen2_5OmniThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.parse import MultiModalDataItems

from services.families.qwen2_5_omni.thinker_rope import Medium, rope_positions
from services.thinker.plugin.connector import settings_of
from services.thinker.plugin.media_order import in_token_order
from services.thinker.plugin.recording import record
from services.thinker.plugin.rows import layers_of


class TimedVideoProcessor(Qwen2_5OmniThinkerMultiModalProcessor):
    """Sorts a video's sound between its frames by the frames' times. vLLM assumes two frames a second."""

    def _get_prompt_updates(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        seconds = out_mm_kwargs.get_data().get("second_per_grid_ts")
        if seconds is not None:
            hf_processor_mm_kwargs = {**hf_processor_mm_kwargs, "second_per_grid_ts": seconds.flatten().tolist()}
        return super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)


@MULTIMODAL_REGISTRY.register_processor(
    TimedVideoProcessor,
    info=Qwen2_5OmniThinkerProcessingInfo,
    dummy_inputs=Qwen2_5OmniThinkerDummyInputsBuilder,
)
class RecordingThinker(Qwen2_5OmniThinkerForConditionalGeneration):
    """Records the states after the last norm and before the first layer, and all M-RoPE positions.

    Without our connector in the config it equals its base class.
    """

    # The base class misnames the vision tower's layer, and would quantize it where the checkpoint does not.
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = (
        Qwen2_5OmniThinkerForConditionalGeneration.packed_modules_mapping | {"qkv": ["q", "k", "v"]}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        thinker_config = vllm_config.model_config.hf_config.thinker_config
        # vLLM reads the text config's default, transformers the thinker's value.
        thinker_config.text_config.tie_word_embeddings = thinker_config.tie_word_embeddings
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        settings = settings_of(vllm_config)
        self._records = settings is not None
        self._layers = layers_of(settings.kinds) if settings else ()

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> Any:
        if 0 in self._layers and inputs_embeds is None:
            language_model: Any = self.language_model
            inputs_embeds = language_model.embed_input_ids(input_ids)
        hidden: Any = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        if self._records:
            states: list[Any] = [inputs_embeds if layer == 0 else hidden for layer in self._layers]
            record([*states, positions.t()])
        return hidden

    def embed_input_ids(
        self, input_ids: torch.Tensor, multimodal_embeddings: Any = None, *, is_multimodal: torch.Tensor | None = None
    ) -> torch.Tensor:
        if multimodal_embeddings and is_multimodal is not None:
            modalities = {
                self.config.video_token_index: "video",
                self.config.audio_token_index: "audio",
                self.config.image_token_index: "image",
            }
            multimodal_embeddings = in_token_order(multimodal_embeddings, input_ids, is_multimodal, modalities)
        return super().embed_input_ids(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        """Rope positions of a prompt, (3, tokens) int64, and the offset of later tokens from their index."""
        media = [
            Medium(
                offset,
                data.get("audio_feature_length") if kind == "audio" or data.get("use_audio_in_video") else None,
                (data["grid_t"], data["grid_h"], data["grid_w"]) if kind != "audio" else None,
                data.get("t_factor", 0.0),
            )
            for offset, kind, data in self.iter_mm_features(mm_features)
        ]
        positions = rope_positions(input_tokens, media, self.config.video_token_index, self.config.audio_token_index)
        return positions, int(positions.max()) + 1 - len(input_tokens)
