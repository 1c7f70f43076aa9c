"""Models that write down speech, by vLLM's own door for them, `SupportsTranscription`."""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from services.common.errors import InvalidInput, InvalidMedia
from services.thinker.conversation import Prompt, SpokenInput
from services.thinker.family import ThinkerCheckpoint

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.thinker.engine import ThinkerEngine

_BEFORE = "<|startofprev|>"  # the token that begins what was said before a sound, where the vocabulary has one
_ENGLISH = "en"  # what a translation is in, if that is not said
_SUPPRESSED = -100.0  # bias of a token that is not to be sampled


class SpeechPrompts:
    """The prompts of such a model.

    Attributes:
        max_s: length of a sound; inf: no bound is known.
    """

    def __init__(self, llm: "AsyncLLM", checkpoint: ThinkerCheckpoint) -> None:
        from vllm.model_executor.model_loader import get_model_cls
        from vllm.model_executor.models.interfaces import (
            StreamingTranscriptionPostProcessor,
            SupportsTranscription,
        )

        self._config, self._renderer, self._tokenizer = llm.model_config, llm.renderer, checkpoint.tokenizer
        self._model: Any = get_model_cls(self._config)
        self._tasks = {
            task: self._model.get_speech_to_text_config(self._config, task) for task in ("transcribe", "translate")
        }
        self.max_s: float = self._tasks["transcribe"].max_audio_clip_s or math.inf
        self._suppressed: list[int] = self._config.try_get_generation_config().get("suppress_tokens") or []
        added = sorted((token.content for token in self._tokenizer.added_tokens_decoder.values()), key=len)
        self._control = re.compile("|".join(map(re.escape, reversed(added))) or r"(?!)")
        self._numbers = itertools.count()
        kept_as_it_is: Any = SupportsTranscription.post_process_output
        self._is_cleaned = self._model.post_process_output.__func__ is not kept_as_it_is.__func__
        self._stream_cleaner: type[StreamingTranscriptionPostProcessor] = self._model.get_streaming_post_processor_cls()
        self._is_streamed = self._stream_cleaner is not StreamingTranscriptionPostProcessor

    def suppress(self, params: "SamplingParams") -> None:
        """Rules out what the checkpoint's generation_config does, as transformers: music, brackets, ..."""
        if self._suppressed:
            params.logit_bias = dict.fromkeys(self._suppressed, _SUPPRESSED) | (params.logit_bias or {})

    def cleaner(self) -> Callable[[str, bool], str] | None:
        """What leaves out of one transcript, piece by piece, the marks that the model writes around it; None: it writes
        none. Takes a piece and whether it is the last."""
        if self._is_streamed:
            return self._stream_cleaner().process_delta
        return _Whole(self._model.post_process_output) if self._is_cleaned else None

    async def prompt(self, engine: "ThinkerEngine", samples: np.ndarray, asked: SpokenInput) -> Prompt:
        """The prompt for `samples`, (n) float32 at the checkpoint's rate. `engine` hears which language is spoken, if
        that is not said and the model has to know.

        Raises:
            InvalidInput: the model does not know the language.
            InvalidMedia: the model takes no such sound.
        """
        from vllm.config.speech_to_text import SpeechToTextParams

        task = "translate" if asked.translates else "transcribe"
        languages = {name: self._known(name, getattr(asked, name)) for name in ("language", "to_language")}
        if languages["language"] is None and getattr(self._model, "supports_explicit_language_detection", False):
            languages["language"] = await self._language(engine, samples, asked)
        elif languages["language"] is None:
            languages["language"] = self._model.validate_language(None)  # some have a default
        if asked.translates:
            languages["to_language"] = languages["to_language"] or _ENGLISH
        hints = self._control.sub(" ", asked.hints).strip()
        before = self._tokenizer.get_vocab().get(_BEFORE)
        params = SpeechToTextParams(
            audio=samples,
            stt_config=self._tasks[task],
            model_config=self._config,
            task_type=task,
            request_prompt=hints if before is None else "",
            hotwords=hints or None,
            **languages,
        )
        prompt = await self._read(lambda: self._model.get_generation_prompt(params), asked.file.field)
        return self._preceded(prompt, before, hints) if hints and before is not None else prompt

    def _preceded(self, prompt: Prompt, before: int, text: str) -> Prompt:
        """`prompt`, with the end of `text` as what was said before. vLLM writes a marker that is no token, and puts a
        start before it. Source of the form: `WhisperTokenizer.get_prompt_ids`, and OpenAI's half of the context.
        """
        most = self._config.max_model_len // 2 - 1
        said = self._tokenizer(f" {text}", add_special_tokens=False)["input_ids"][-most:]
        token_ids = [before, *said, *prompt.token_ids]
        prompt.engine_input["decoder_prompt"]["prompt_token_ids"] = token_ids
        return replace(prompt, token_ids=token_ids)

    def _known(self, field: str, language: str) -> str | None:
        """None: it is not said. Raises InvalidInput."""
        known = self._model.supported_languages
        if language and language not in known:
            raise InvalidInput(f"transcription.{field}", f"is {language[:16]!r}; this model knows {', '.join(known)}")
        return language or None

    async def _language(self, engine: "ThinkerEngine", samples: np.ndarray, asked: SpokenInput) -> str:
        from vllm import SamplingParams

        ids = self._model.get_language_token_ids(self._tokenizer)
        config = self._tasks["transcribe"]
        prompt = await self._read(lambda: self._model.get_language_detection_prompt(samples, config), asked.file.field)
        params = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=ids)
        heard: list[int] = []
        async for step in engine.generate(f"language-{next(self._numbers)}", prompt, params):
            heard += step.token_ids
        return self._model.parse_language_detection_output(heard, self._tokenizer)

    async def _read(self, make: Callable[[], Any], field: str) -> Prompt:
        """What the model makes. Raises InvalidMedia: it refuses."""
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        engine_input: Any
        try:
            (engine_input,) = await self._renderer.render_cmpl_async([parse_model_prompt(self._config, make())])
        except ValueError as error:  # its text quotes vLLM's objects
            raise InvalidMedia(field, "the model takes no sound of such a length, or no such hints") from error
        if "decoder_prompt" in engine_input:  # the sound is in the encoder's
            return Prompt(list(engine_input["decoder_prompt"]["prompt_token_ids"]), [], 0, 0, engine_input)
        return Prompt.read(engine_input)


class _Whole:
    """Keeps the pieces of a text, and gives all of it, cleaned, with the last one."""

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean, self._text = clean, ""

    def __call__(self, piece: str, is_last: bool) -> str:
        self._text += piece
        return self._clean(self._text) if is_last else ""
