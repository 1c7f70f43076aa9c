"""The reference: transformers' Qwen3OmniMoeForConditionalGeneration, greedy, with its known faults worked around.

Worked around, and nothing else changed:
- image or video together with audio crashes its talker: `audio_config` is missing from the talker's config;
- `talker_max_new_tokens` N gives N - 1 frames;
- the last token of an answer cut by length is not spoken: one token more may be generated, and is dropped;
- an empty answer, or one whose first code is the end of speech, crashes: it has no frames here;
- `chunked_decode` loses samples at chunk boundaries: all frames are decoded at once;
- `thinker_eos_token_id` is a constant: here it is the tokenizer's.

Its answers are kept: see `kept`.
"""

import contextlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version

from tests.support.kept import kept_value

Conversation = list[dict[str, Any]]
_NO_SOUND_IN_VIDEO = Version("5.24")  # where it was seen: it counts the sound's tokens before they are in the prompt


@dataclass(frozen=True)
class ReferenceAnswer:
    """What the reference says.

    Attributes:
        prompt_ids: (positions,) int64.
        token_ids: the answer, without its end-of-sequence token.
        text: the answer, decoded.
        codes: (frames, groups) int64.
        waveform: (samples,) float32.
        rope_positions: the thinker's, (positions, 3) int64.
        hidden_states: layer -> (positions + answer, hidden), for the layers asked for.
    """

    prompt_ids: np.ndarray
    token_ids: list[int]
    text: str
    codes: np.ndarray
    waveform: np.ndarray
    rope_positions: torch.Tensor
    hidden_states: dict[int, torch.Tensor]


def default_voice(voices: dict[str, int]) -> str:
    """The default of transformers' `generate`, which a random checkpoint need not have."""
    return "ethan" if "ethan" in voices else min(voices)


class NothingToSay(Exception):
    pass


@dataclass(frozen=True)
class Question:
    """What `Reference.answer` is asked."""

    conversation: Conversation
    max_tokens: int
    max_frames: int
    speaker: str | None
    layers: tuple[int, ...]
    use_audio_in_video: bool
    processor_arguments: dict[str, Any]


class Reference:
    """One model for many conversations, loaded when it is first needed. Not for concurrent use."""

    sources: tuple[Path, ...] = (Path(__file__),)
    """Files that answers depend on."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def processor(self) -> Any:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(self._checkpoint)

    @cached_property
    def model(self) -> Any:
        from transformers import Qwen3OmniMoeForConditionalGeneration

        model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(self._checkpoint, dtype=torch.float32).eval()
        model.talker.config.audio_config = model.config.thinker_config.audio_config
        return model

    @property
    def config(self) -> Any:
        return self.model.config

    def answer(
        self,
        conversation: Conversation,
        max_tokens: int,
        max_frames: int,
        speaker: str | None = None,
        layers: tuple[int, ...] = (),
        use_audio_in_video: bool = False,
        **processor_arguments: Any,
    ) -> ReferenceAnswer:
        """Answers greedily, with the checkpoint's own repetition penalty for the talker.

        Args:
            conversation: messages whose content is a list of parts: {"type": "text", "text"}, {"type": "image",
                "image": PIL image}, {"type": "audio", "audio": samples at the feature extractor's rate},
                {"type": "video", "video": frames (n, h, w, 3) uint8}.
            max_tokens: most tokens of the answer.
            max_frames: most codec frames.
            speaker: voice; by default transformers' own, where the checkpoint has it, else the alphabetically first.
            layers: whose hidden states are wanted; 0 is the embeddings.
            use_audio_in_video: whether the audio parts are the sound of the video parts, in order.
            processor_arguments: passed on, e.g. `fps`.
        """
        asked = (conversation, max_tokens, max_frames, speaker, layers, use_audio_in_video, processor_arguments)
        return kept_value(lambda: self._answer(Question(*asked)), self._checkpoint, *self.sources, *asked)

    @torch.inference_mode()
    def _answer(self, asked: Question) -> ReferenceAnswer:
        inputs = self.inputs(asked.conversation, asked.use_audio_in_video, asked.processor_arguments)
        recorded: dict[str, Any] = {}
        wave = None
        with contextlib.suppress(NothingToSay):
            wave = self._spoken(asked, inputs, recorded)
        return self._recorded_answer(asked, inputs, recorded, wave)

    def _spoken(self, asked: Question, inputs: dict[str, torch.Tensor], recorded: dict[str, Any]) -> torch.Tensor:
        """The waveform. Leaves the thinker's result and the codes, (frames, groups), in `recorded`; raises
        `NothingToSay` where there are none."""
        eos = self.processor.tokenizer.eos_token_id
        original_generate, original_decode = self.model.thinker.generate, self.model.code2wav.chunked_decode

        def record_thinker(*args: Any, **kwargs: Any) -> Any:
            recorded["thinker"] = result = original_generate(*args, **kwargs)
            if len(self._answer_ids(result.sequences[0], inputs, eos, asked.max_tokens)) == 0:
                raise NothingToSay
            return result

        def record_codes(codes: torch.Tensor, **_: Any) -> torch.Tensor:
            recorded["codes"] = codes[0].T.clone()
            return self.model.code2wav(codes)

        self.model.thinker.generate, self.model.code2wav.chunked_decode = record_thinker, record_codes
        original_talker = self.model.talker.generate
        self.model.talker.generate = lambda **kwargs: _with_frames(original_talker(**kwargs))
        try:
            _, wave = self.model.generate(
                **inputs,
                speaker=asked.speaker or default_voice(self.config.talker_config.speaker_id),
                use_audio_in_video=asked.use_audio_in_video,
                thinker_max_new_tokens=asked.max_tokens + 1,
                thinker_eos_token_id=eos,
                thinker_do_sample=False,
                talker_do_sample=False,
                talker_max_new_tokens=asked.max_frames + 1,
                **self._talker_penalty(),
            )
        finally:
            for owner, name in ((self.model.thinker, "generate"), (self.model.talker, "generate")):
                del owner.__dict__[name]
            self.model.code2wav.chunked_decode = original_decode
            del self.model.code2wav.__dict__["chunked_decode"]

        return wave

    @property
    def _groups(self) -> int:
        return self.config.talker_config.num_code_groups

    def _recorded_answer(
        self,
        asked: Question,
        inputs: dict[str, torch.Tensor],
        recorded: dict[str, Any],
        wave: torch.Tensor | None,
    ) -> ReferenceAnswer:
        """As `_spoken` recorded it. `wave`: None without speech."""
        thinker, tokenizer = recorded["thinker"], self.processor.tokenizer
        ids = self._answer_ids(thinker.sequences[0], inputs, tokenizer.eos_token_id, asked.max_tokens)
        return ReferenceAnswer(
            prompt_ids=inputs["input_ids"][0].numpy(),
            token_ids=ids,
            text=tokenizer.decode(ids, skip_special_tokens=True),
            codes=recorded["codes"].numpy() if "codes" in recorded else np.zeros((0, self._groups), np.int64),
            waveform=np.zeros(0, np.float32) if wave is None else wave.float().flatten().numpy(),
            rope_positions=self.rope_positions(inputs, asked.use_audio_in_video),
            hidden_states={k: torch.cat([step[k][0] for step in thinker.hidden_states]) for k in asked.layers},
        )

    def inputs(
        self, conversation: Conversation, use_audio_in_video: bool, arguments: dict[str, Any] | None = None
    ) -> dict[str, torch.Tensor]:
        """The processor's outputs for a conversation, as `answer` takes them."""
        media: dict[str, list] = {"image": [], "audio": [], "video": []}
        for message in conversation:
            for part in message["content"] if isinstance(message["content"], list) else []:
                if part["type"] in media:
                    media[part["type"]].append(part[part["type"]])
        shown = conversation
        if use_audio_in_video and Version(transformers.__version__) >= _NO_SOUND_IN_VIDEO:
            pytest.skip(f"the processor of transformers {transformers.__version__} takes no video with its sound")
        if use_audio_in_video:  # the sound is part of the video in the prompt
            shown = [
                {**m, "content": [p for p in m["content"] if p["type"] != "audio"]}
                if isinstance(m["content"], list)
                else m
                for m in conversation
            ]
        text = self.processor.apply_chat_template(shown, add_generation_prompt=True, tokenize=False)
        inputs = self.processor(
            text=text,
            images=media["image"] or None,
            audio=media["audio"] or None,
            videos=media["video"] or None,
            return_tensors="pt",
            use_audio_in_video=use_audio_in_video,
            **(arguments or {}),
        )
        return dict(inputs)

    def _talker_penalty(self) -> dict[str, float]:
        penalty = getattr(self.model.generation_config, "talker_repetition_penalty", None)
        return {} if penalty is None else {"talker_repetition_penalty": penalty}

    @staticmethod
    def _answer_ids(sequence: torch.Tensor, inputs: dict, eos: int, max_tokens: int) -> list[int]:
        ids = sequence[inputs["input_ids"].shape[1] :].tolist()
        return ids[: ids.index(eos)] if eos in ids[:max_tokens] else ids[:max_tokens]

    def rope_positions(self, inputs: dict[str, torch.Tensor], use_audio_in_video: bool) -> torch.Tensor:
        """The thinker's own rope positions of the prompt: (positions, 3) int64."""
        lengths = inputs.get("feature_attention_mask")
        positions, _ = self.model.thinker.get_rope_index(
            inputs["input_ids"],
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            inputs["attention_mask"],
            use_audio_in_video,
            None if lengths is None else lengths.sum(dim=1),
            inputs.get("video_second_per_grid"),
        )
        return positions[:, 0].T.long()


def _with_frames(result: Any) -> Any:
    if all(step[-1] is None for step in result.hidden_states):
        raise NothingToSay
    return result
