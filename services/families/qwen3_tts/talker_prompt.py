"""The prompt of Qwen3-TTS's talker, and the text ids that follow.

Source: `Qwen3TTSForConditionalGeneration.generate` and `generate_icl_prompt` of the package qwen-tts 0.1.1.
"""

from collections.abc import Mapping
from typing import Any

import torch

from services.talker.inputs import Delivery, Prompt
from services.talker.text import GrowingText, TextTokenizer


class PromptSpec:
    """Ids of a checkpoint's prompts. `im_*` and `tts_*` are text; `codec_*` and the mappings have codes.

    Attributes:
        languages: without dialects.
        whole_text_first: whether the prompt has the whole text by default.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        talker = config["talker_config"]
        self.im_start_id: int = config["im_start_token_id"]
        self.im_end_id: int = config["im_end_token_id"]
        self.tts_bos_id: int = config["tts_bos_token_id"]
        self.tts_eos_id: int = config["tts_eos_token_id"]
        self.tts_pad_id: int = config["tts_pad_token_id"]
        self.codec_pad_id: int = talker["codec_pad_id"]
        self.codec_bos_id: int = talker["codec_bos_id"]
        language_ids: Mapping[str, int] = talker.get("codec_language_id") or {}
        think_id, bos_id, eos_id = talker["codec_think_id"], talker["codec_think_bos_id"], talker["codec_think_eos_id"]
        self._codes_of = {language: [think_id, bos_id, code, eos_id] for language, code in language_ids.items()}
        self._codes_of_none = [talker["codec_nothink_id"], bos_id, eos_id]
        self.speaker_ids: Mapping[str, int] = talker.get("spk_id") or {}
        dialects: Mapping[str, Any] = talker.get("spk_is_dialect") or {}
        self.dialect_of = {speaker: dialect for speaker, dialect in dialects.items() if dialect}
        self.languages = tuple(name for name in language_ids if "dialect" not in name)
        self.whole_text_first = config.get("tts_model_type") != "base"

    def language_codes(self, delivery: Delivery) -> list[int]:
        """Codes of the language, or of none. A voice with a dialect speaks it for Chinese."""
        language = delivery.language
        if language in ("", "chinese"):
            language = self.dialect_of.get(delivery.speaker, language)
        return [*(self._codes_of[language] if language else self._codes_of_none)]


class SpokenText(GrowingText):
    """A `services.talker.inputs.TextInput`: instructions, then the text, which may continue a voice sample's."""

    def __init__(self, spec: PromptSpec, tokenizer: TextTokenizer, delivery: Delivery) -> None:
        super().__init__(tokenizer)
        self._spec, self._delivery, self._frames = spec, delivery, delivery.frames_before
        user = tokenizer.encode(f"user\n{delivery.instructions}")
        instructions = [spec.im_start_id, *user, spec.im_end_id, *tokenizer.encode("\n")]
        self._instructions = instructions if delivery.instructions.strip() else []
        self._header = [spec.im_start_id, *tokenizer.encode("assistant\n")]
        self._whole = spec.whole_text_first if delivery.whole_text_first is None else delivery.whole_text_first
        sample = GrowingText(tokenizer)
        sample_text = delivery.sample_text if self._frames is not None else ""
        sample.add(sample_text)
        sample.finish()
        self.ids = sample.ids  # the text continues the sample's

    @property
    def ready(self) -> bool:
        """Whether the prompt's last row has its text. Each frame of a voice sample takes an id."""
        if self.finished:
            return not self.is_empty
        return not self._whole and self.tokens > 0 and len(self.ids) >= self._sample_rows

    @property
    def _sample_rows(self) -> int:
        """Rows of the codec's beginning and of the voice sample."""
        return 1 + (0 if self._frames is None else len(self._frames))

    def take_prompt(self) -> Prompt:
        """The prompt, once `ready`. Its text is gone for `take_text`, except the last row's."""
        spec, voice = self._spec, self._delivery.voice
        codes = spec.language_codes(self._delivery)
        speaker_at = len(self._instructions) + len(self._header) + len(codes)
        if voice is not None:
            codes.append(-1)  # the row has the voice's vector
        elif self._delivery.speaker:
            codes.append(spec.speaker_ids[self._delivery.speaker])
        text = [*self._instructions, *self._header, *[spec.tts_pad_id] * len(codes), spec.tts_bos_id]
        codes = [*[-1] * (len(self._instructions) + len(self._header)), *codes, spec.codec_pad_id]
        last_text, last_codes, after_text = self._whole_text() if self._whole else self._streamed_text()
        text, codes = text + last_text, codes + last_codes
        return Prompt(
            text_ids=torch.tensor(text),
            codes=torch.tensor(codes),
            positions=torch.arange(len(text))[:, None].expand(-1, 3),
            vectors=() if voice is None else ((speaker_at, voice.vector),),
            frames=self._frames,
            frames_at=0 if self._frames is None else len(codes) - len(self._frames),
            after_text=after_text,
        )

    def _whole_text(self) -> tuple[list[int], list[int], tuple[int, ...]]:
        """(text ids and codes of the last rows, text of the steps), with the text before the sample's frames."""
        spec, rows = self._spec, self._sample_rows
        text = [*self.ids, spec.tts_eos_id]
        self.ids = [spec.tts_pad_id]
        codes = [*[spec.codec_pad_id] * len(text), spec.codec_bos_id, *[-1] * (rows - 1)]
        return [*text, *[spec.tts_pad_id] * rows], codes, (spec.tts_pad_id,)

    def _streamed_text(self) -> tuple[list[int], list[int], tuple[int, ...]]:
        """The same, with the text beside the sample's frames and then beside the speech."""
        spec, rows = self._spec, self._sample_rows
        codes, pad = [spec.codec_bos_id, *[-1] * (rows - 1)], spec.tts_pad_id
        if len(self.ids) >= rows:
            text, self.ids = self.ids[:rows], self.ids[rows - 1 :]
            return text, codes, (spec.tts_eos_id, pad)
        text = [*self.ids, spec.tts_eos_id]
        text += [pad] * (rows - len(text))
        self.ids = text[-1:]
        return text, codes, (pad,)
