"""The reference for Qwen2.5-Omni: transformers' Qwen2_5OmniForConditionalGeneration, greedy, its faults worked around.

Worked around, and nothing else changed:
- image or video together with audio is refused by its talker's `generate`, which is given more than it reads;
- `generate` drops a mask of ones, without which its talker leaves out two codes of the prompt and TMRoPE;
- `talker_eos_token_id` are constants: here they are the checkpoint's;
- an answer without a token that is followed by another crashes: it has no frames here.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import tests.support.references.qwen3_omni
from benchmarks.peers.chat import keep_mask
from services.families.qwen2_5_omni.thinker import SYSTEM_PROMPT
from services.registry import read_config
from tests.support.references.qwen3_omni import Conversation, NothingToSay, Question, Reference


class Qwen25Reference(Reference):
    """See `Reference`. Noise of the waveform is drawn by seed 0."""

    sources = (Path(tests.support.references.qwen3_omni.__file__), Path(__file__))

    @cached_property
    def model(self) -> Any:
        from transformers import Qwen2_5OmniForConditionalGeneration

        model: Any = Qwen2_5OmniForConditionalGeneration.from_pretrained(self._checkpoint, dtype=torch.float32).eval()
        keep_mask(model)
        return model

    def inputs(
        self, conversation: Conversation, use_audio_in_video: bool, arguments: dict[str, Any] | None = None
    ) -> dict[str, torch.Tensor]:
        """As `Reference.inputs`; a conversation without a system message gets the one that the model card asks for."""
        if conversation[0]["role"] != "system":
            conversation = [{"role": "system", "content": SYSTEM_PROMPT}, *conversation]
        return super().inputs(conversation, use_audio_in_video, arguments)

    def _spoken(self, asked: Question, inputs: dict[str, torch.Tensor], recorded: dict[str, Any]) -> torch.Tensor:
        eos, model = self.processor.tokenizer.eos_token_id, self.model
        generate, decode = model.thinker.generate, model.token2wav.forward

        def record_thinker(*args: Any, **kwargs: Any) -> Any:
            recorded["thinker"] = result = generate(*args, **kwargs)
            if len(result.hidden_states) < 2:
                raise NothingToSay
            return result

        def record_codes(codes: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            recorded["codes"] = codes[0][:, None].clone()
            if not codes.shape[1]:
                raise NothingToSay
            torch.manual_seed(0)
            return decode(codes, *args, **kwargs)

        codec = model.config.talker_config
        model.thinker.generate, model.token2wav.forward = record_thinker, record_codes
        try:
            _, wave = model.generate(
                **inputs,
                speaker=asked.speaker or "Chelsie",
                use_audio_in_video=asked.use_audio_in_video,
                thinker_max_new_tokens=asked.max_tokens,
                thinker_eos_token_id=eos,
                thinker_do_sample=False,
                talker_do_sample=False,
                talker_max_new_tokens=asked.max_frames,
                talker_eos_token_id=[codec.tts_codec_pad_token_id, codec.tts_codec_end_token_id],
            )
        finally:
            del model.thinker.__dict__["generate"], model.token2wav.__dict__["forward"]

        return wave

    @property
    def _groups(self) -> int:
        return 1


def reference_of(checkpoint: Path) -> Reference:
    """The reference of the checkpoint's family."""
    is_qwen2_5 = read_config(checkpoint)["model_type"] == "qwen2_5_omni"
    return Qwen25Reference(checkpoint) if is_qwen2_5 else Reference(checkpoint)
