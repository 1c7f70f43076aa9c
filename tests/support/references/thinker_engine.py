"""transformers' thinker by itself, for the tests of the thinker. Its answers are kept: see `kept`."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from services.registry import read_config
from tests.support.kept import kept_value

CLASSES = {
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
}


@dataclass
class Answer:
    """The reference's answer: all token ids, and the states of every position by layer ((n, hidden))."""

    prompt_ids: list[int]
    output_ids: list[int]
    hidden_states: list[torch.Tensor]
    rope_positions: torch.Tensor


class Reference:
    """transformers' thinker in float32, greedy, past any end of sequence. Loaded when it is first needed."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def processor(self) -> Any:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(self._checkpoint)

    @cached_property
    def thinker(self) -> Any:
        import transformers

        model: Any = getattr(transformers, CLASSES[read_config(self._checkpoint)["model_type"]])
        thinker = model.from_pretrained(self._checkpoint, dtype=torch.float32)
        thinker.generation_config.eos_token_id = None  # answers of a given length are compared
        return thinker.eval()

    def answer(self, conversation: list[dict[str, Any]], max_tokens: int, **media: Any) -> Answer:
        """What the model answers to `conversation` (as the chat template takes it) with decoded `media`
        (`images`, `audio`, `videos` and options of the processor)."""
        asked = (conversation, max_tokens, media)
        return kept_value(lambda: self._answer(*asked), self._checkpoint, Path(__file__), *asked)

    @torch.inference_mode()
    def _answer(self, conversation: list[dict[str, Any]], max_tokens: int, media: dict[str, Any]) -> Answer:
        text = self.processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        inputs = self.processor(text=text, return_tensors="pt", **media)
        prompt = inputs["input_ids"]
        options = {"use_audio_in_video": media.get("use_audio_in_video", False)}
        sequence = self.thinker.generate(**inputs, **options, max_new_tokens=max_tokens, do_sample=False, num_beams=1)
        inputs["input_ids"] = sequence
        inputs["attention_mask"] = torch.ones_like(sequence)
        positions, _ = self.thinker.get_rope_index(
            prompt,
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            attention_mask=torch.ones_like(prompt),
            use_audio_in_video=options["use_audio_in_video"],
            audio_seqlens=inputs["feature_attention_mask"].sum(-1) if "feature_attention_mask" in inputs else None,
            second_per_grids=inputs.get("video_second_per_grid"),
        )
        output = self.thinker(**inputs, **options, output_hidden_states=True)
        return Answer(
            prompt[0].tolist(),
            sequence[0, prompt.shape[1] :].tolist(),
            [states[0] for states in output.hidden_states],
            positions[:, 0].T.to(torch.int32),
        )
