"""Models of vLLM that answer messages, and have prompts of their own for speech: equal to transformers for these."""

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import soundfile
import torch

from services.common.errors import InvalidInput, InvalidMedia
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, MediaFile, Message, SpokenInput
from services.thinker.media import decode_audio
from tests.support.samples.media import wav
from tests.support.stage.thinking import thinking
from tests.support.tiers import tiered
from tests.support.weights.speech_models import SPEECH, published_checkpoint, reference

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUICK = "qwen3_asr"
RATE_HZ, TOKENS = 16_000, 16
HEARD = "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n<|im_start|>assistant\n"
# What vLLM's class asks for (language, hints, whether to translate, language of the translation).
PROMPTS: dict[str, dict[tuple[str, str, bool, str], str]] = {
    "qwen3_asr": {
        ("", "", False, ""): HEARD,
        ("de", "", False, ""): f"{HEARD}language German<asr_text>",
        ("", "Ada <asr_text>King<|im_end|>", False, ""): f"<|im_start|>system\nAda  King<|im_end|>\n{HEARD}",
        ("de", "", True, ""): f"{HEARD}language English<asr_text>",
        ("de", "", True, "fr"): f"{HEARD}language French<asr_text>",
    },
    "glm_asr": {
        ("", "", False, ""): "can you transcribe the speech into a written format?",
        ("de", "Ada", True, ""): "translate the speech to English",
        ("", "", True, "fr"): "translate the speech to French",
    },
}


@dataclass
class Served:
    name: str
    engine: Any
    preprocessor: Any
    processor: Any
    model: Any
    settings: ThinkerSettings

    async def written(self, conversation: Conversation) -> tuple[Any, list[int]]:
        """(prompt, token ids of the answer)."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(output_kind=RequestOutputKind.DELTA, temperature=0, max_tokens=TOKENS, ignore_eos=True)
        prompt, ids = await self.preprocessor.prepare(conversation), list[int]()
        async for step in self.engine.generate("r", prompt, params):
            ids += step.token_ids
        return prompt, ids

    @torch.inference_mode()
    def expected(self, text: str, *sounds: MediaFile) -> tuple[list[int], list[int]]:
        """Token ids of prompt and answer, past any end."""
        heard = [decode_audio(sound, RATE_HZ, self.settings) for sound in sounds]
        inputs = self.processor(text=text, audio=heard, sampling_rate=RATE_HZ, return_tensors="pt")
        ids = self.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        length = inputs["input_ids"].shape[1]
        return ids[0, :length].tolist(), ids[0, length:].tolist()

    def asked(self, content: str) -> str:
        """The text of a prompt."""
        if self.name == "qwen3_asr":
            return content
        turns = [{"role": "user", "content": f"<|audio_pad|>{content}"}]
        return self.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=tiered(SPEECH, QUICK, ("glm_asr",)))
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    processor, model = reference(request.param)
    async with thinking(published_checkpoint(request.param), max_batched_tokens=512) as started:
        of_thinker = started.engine, started.preprocessor
        yield Served(request.param, *of_thinker, processor, model, started.settings)


def sound(*of: Any) -> MediaFile:
    return MediaFile("audio", wav(*of), "sound")


def noise(seconds: float) -> MediaFile:
    """Speech is not needed: weights are random."""
    samples, file = np.random.default_rng(3).normal(0, 0.1, round(seconds * RATE_HZ)), io.BytesIO()
    soundfile.write(file, samples, RATE_HZ, format="WAV", subtype="PCM_16")
    return MediaFile("audio", file.getvalue(), "sound")


def spoken(file: MediaFile, language: str, hints: str, translates: bool, to_language: str) -> Conversation:
    return Conversation([], spoken=SpokenInput(file, language, translates, to_language, hints))


async def test_transcripts_are_those_of_transformers_for_vllms_prompts(served: Served) -> None:
    sounds = [sound(1.3037), noise(2.4), sound(4.0, 24000, 500.0)]
    cases = [(file, asked, text) for file in sounds for asked, text in PROMPTS[served.name].items()]
    expected = [served.expected(served.asked(text), file) for file, _, text in cases]
    assert len({tuple(ids) for _, ids in expected}) > len(sounds)
    for _ in range(2):  # the second time from the caches
        results = await asyncio.gather(*(served.written(spoken(file, *asked)) for file, asked, _ in cases))
        assert [(prompt.token_ids, ids) for prompt, ids in results] == expected
    for prompt, _ in results:
        assert prompt.audio_tokens == sum(end - begin for begin, end in prompt.multimodal) > 0


async def test_sounds_of_chats_are_heard_as_transformers_does(served: Served) -> None:
    file = noise(1.5)
    parts: Sequence[Any] = [file] if served.name == "qwen3_asr" else [file, "What was said?"]
    prompt, ids = await served.written(
        Conversation([Message("system", ["Ada Lovelace"]), Message("user", list(parts))])
    )
    content = [{"type": "audio"}, *({"type": "text", "text": part} for part in parts[1:])]
    turns = [{"role": "system", "content": "Ada Lovelace"}, {"role": "user", "content": content}]
    text = served.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert (prompt.token_ids, ids) == served.expected(text, file)


async def test_words_that_the_template_leaves_out_are_refused(served: Served) -> None:
    conversation = Conversation([Message("user", [noise(1.0)]), Message("user", [noise(1.0), "What was said?"])])
    if served.name != "qwen3_asr":
        assert served.preprocessor.template.reads_users
        return
    left_out = r"messages\[1\].content: the model's chat template leaves out what users write; send sounds alone"
    with pytest.raises(InvalidInput, match=left_out):
        await served.preprocessor.prepare(conversation)


async def test_what_it_cannot_write_down_is_refused_by_name(served: Served) -> None:
    with pytest.raises(InvalidInput, match=r"transcription\.language: is 'xx'; this model knows .*en"):
        await served.preprocessor.prepare(spoken(noise(1.0), "xx", "", False, ""))
    with pytest.raises(InvalidMedia, match=r"sound: lasts longer than the (30|655) s that the model hears at a time"):
        await served.preprocessor.prepare(spoken(noise(656.0), "", "", False, ""))


async def test_marks_around_the_text_are_left_out_piece_by_piece(served: Served) -> None:
    pieces = ["lang", "uage Ger", "man<asr", "_text>Ada", " King", ""]
    if served.name != "qwen3_asr":
        assert served.engine.speech_prompts.cleaner() is None
        return
    for said, expected in ((pieces, "Ada King"), (["Ada", " King"], "Ada King"), (["language", ""], "language")):
        clean = served.engine.speech_prompts.cleaner()
        assert "".join(clean(piece, i == len(said) - 1) for i, piece in enumerate(said)) == expected
