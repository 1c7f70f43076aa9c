"""vLLM's multimodal processor of the thinker, without its own padding of audio."""

from collections.abc import Mapping
from typing import Any

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
