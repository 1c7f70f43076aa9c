"""Qwen3-TTS' talker draws the codes of the package qwen-tts, for every form of a prompt, and says what it cannot do."""

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from quartet.v1 import talker_pb2
from services.common.errors import InvalidInput
from services.common.stream.tensors import to_message
from services.talker.engine import TalkerEngine
from services.talker.family import TalkerFamily
from services.talker.inputs import Delivery, Voice
from services.talker.model import load_talker
from services.talker.runner import TalkerRunner
from services.talker.sampling import resolve
from services.talker.speech import SpeechRequest
from tests.support.references.qwen_tts import load_tts
from tests.support.samples.voice import RATE_HZ, voice_like
from tests.support.stage.talker import ServedTalker
from tests.support.weights.checkpoints import tts_checkpoint

KINDS = {
    "custom_voice": "qwen3-tts",
    "voice_design": "qwen3-tts-voice-design",
    "base": "qwen3-tts-base",
}
SIZES = ("tiny", "small")
FRAMES, SLOTS = 6, 8
TEXT = "The boats go out at 7, and they come back when the wind turns. Don't they?"
SAMPLE_TEXT = "I said this."


@dataclass(frozen=True)
class Form:
    """One way to say TEXT. `sample_s`: of the voice to imitate; 0: none. `with_text`: whether its text is told."""

    language: str
    speaker: str
    instructions: str
    whole: bool
    sample_s: float = 0.0
    with_text: bool = False


def forms(family: TalkerFamily) -> list[Form]:
    """All ways that a checkpoint has."""
    languages, whole = ("", *family.languages), (True, False)
    asked = ("", "Whisper it, and slowly.") if family.takes_instructions else ("",)
    if family.sample_reader is None:
        return [Form(*form) for form in product(languages, family.spec.speakers or ("",), asked, whole)]
    # The text takes 40 frames or so: one sample is shorter, one longer.
    samples = ((1.0, False), (1.0, True), (6.0, True))
    return [
        Form(language, "", "", all_first, *sample) for language, all_first, sample in product(languages, whole, samples)
    ]


def spread(every: Sequence[Form], count: int) -> list[Form]:
    """Some of them, with each value of each field."""
    chosen = random.Random(5).sample(every, min(count, len(every)))
    assert all({getattr(f, n) for f in every} == {getattr(f, n) for f in chosen} for n in Form.__dataclass_fields__)
    return chosen


@cache
def sample(seconds: float) -> torch.Tensor:
    return voice_like(seconds)


class Pair:
    """Quartet's talker of a checkpoint, and the reference on the same weights."""

    def __init__(self, kind: str, size: str) -> None:
        folder = tts_checkpoint(KINDS[kind], size)
        self.kind, self.reference = kind, load_tts(folder)
        self.family, self.model = load_talker(str(folder), torch.device("cpu"))
        reader = self.family.sample_reader
        self.reader = reader(self.model.device, self.model.dtype) if reader else None

    def expected(self, form: Form) -> torch.Tensor:
        """The reference's codes (frames, groups)."""
        drawn: list[torch.Tensor] = []
        model = self.reference.model
        generate, decode = model.generate, model.speech_tokenizer.decode

        def spy(**arguments: Any) -> Any:
            codes, states = generate(**arguments)
            drawn.extend(codes)
            return codes, states

        greedy = {"do_sample": False, "subtalker_dosample": False, "max_new_tokens": FRAMES + 1}
        greedy |= {"language": form.language or "Auto", "non_streaming_mode": form.whole}
        model.generate, model.speech_tokenizer.decode = spy, lambda codes: ([np.zeros(1) for _ in codes], RATE_HZ)
        try:
            if self.kind == "custom_voice":
                asked = form.instructions or None
                self.reference.generate_custom_voice(TEXT, speaker=form.speaker, instruct=asked, **greedy)
            elif self.kind == "voice_design":
                self.reference.generate_voice_design(TEXT, instruct=form.instructions, **greedy)
            else:
                heard = (sample(form.sample_s).numpy(), RATE_HZ)
                said = SAMPLE_TEXT if form.with_text else None
                self.reference.generate_voice_clone(
                    TEXT, ref_audio=heard, ref_text=said, x_vector_only_mode=not form.with_text, **greedy
                )
        finally:
            model.generate, model.speech_tokenizer.decode = generate, decode
        return drawn[0]

    def delivery(self, form: Form) -> Delivery:
        voice: Voice | None = None
        if form.sample_s:
            assert self.reader is not None
            voice = self.reader.read(sample(form.sample_s))
        said = SAMPLE_TEXT if form.with_text else ""
        return Delivery(form.speaker, form.instructions, form.language, form.whole, voice, said)


@cache
def pair(kind: str, size: str) -> Pair:
    return Pair(kind, size)


async def _say(engine: TalkerEngine, family: TalkerFamily, delivery: Delivery, pieces: Sequence[str]) -> torch.Tensor:
    assert family.text_input is not None
    text = family.text_input(delivery)
    for piece in pieces:
        text.add(piece)
    text.finish()
    sampling = resolve(family.spec.defaults, temperature=0, max_frames=FRAMES, seed=0)
    speech = engine.submit(SpeechRequest(text.take_prompt(), text.take_text(), sampling))
    speech.finish_text()
    return torch.cat([frames async for frames in speech.frames()])


async def check(kind: str, size: str, chosen: Sequence[Form]) -> None:
    """All of `chosen` at a time, as many in a batch as there are slots."""
    both = pair(kind, size)
    engine = TalkerEngine(TalkerRunner(both.model, SLOTS, 400))
    cuts = (len(TEXT), 7, 30)
    try:
        said = (
            _say(engine, both.family, both.delivery(form), (TEXT[: cuts[i % 3]], TEXT[cuts[i % 3] :]))
            for i, form in enumerate(chosen)
        )
        codes = await asyncio.gather(*said)
    finally:
        engine.stop()
    wrong = [form for form, own in zip(chosen, codes, strict=True) if not torch.equal(own.long(), both.expected(form))]
    assert not wrong


@pytest.mark.parametrize(("kind", "size"), [("custom_voice", "tiny"), ("voice_design", "small"), ("base", "tiny")])
async def test_codes_equal_the_references(kind: str, size: str) -> None:
    """8 ways to say the text in one batch."""
    await check(kind, size, spread(forms(pair(kind, size).family), SLOTS))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "size"), list(product(KINDS, SIZES)))
async def test_codes_equal_the_references_for_every_form_of_a_prompt(kind: str, size: str) -> None:
    await check(kind, size, forms(pair(kind, size).family))


@pytest_asyncio.fixture
async def cloning() -> AsyncIterator[ServedTalker]:
    async with ServedTalker(tts_checkpoint(KINDS["base"])) as served:
        yield served


def start(text: str = TEXT, seconds: float = 1.0, **spoken: Any) -> talker_pb2.SpeakStart:
    if seconds:
        samples = to_message(sample(seconds))
        spoken["voice_sample"] = talker_pb2.VoiceSample(samples=samples, text=spoken.pop("sample_text", ""))
    said = talker_pb2.SpokenText(text=text, **spoken)
    sampling = talker_pb2.TalkerSampling(temperature=0, max_frames=FRAMES)
    return talker_pb2.SpeakStart(request_id=uuid.uuid4().hex, text=said, sampling=sampling)


async def test_frames_of_a_voice_sample_come_first(cloning: ServedTalker) -> None:
    both = pair("base", "tiny")
    assert both.reader is not None
    heard = both.reader.read(sample(1.0)).frames
    codes, summary = await cloning.call(start(sample_text=SAMPLE_TEXT))
    assert torch.equal(codes[: len(heard)].long(), heard)
    assert torch.equal(codes[len(heard) :].long(), both.expected(Form("", "", "", False, 1.0, True)))
    assert summary.frames == FRAMES
    codes, summary = await cloning.call(start())
    assert len(codes) == summary.frames == FRAMES  # of one whose text is not known, the voice is all that is taken


async def test_typed_text_goes_on_from_a_sample(cloning: ServedTalker) -> None:
    """Each frame of the sample takes an id of text, so that speech starts once there are as many, or no more come."""
    for seconds in (1.0, 6.0):
        whole, _ = await cloning.call(start(seconds=seconds, sample_text=SAMPLE_TEXT))
        typed, summary = await cloning.call(start("", seconds, sample_text=SAMPLE_TEXT), list(TEXT))
        assert torch.equal(typed, whole)
        assert 0 < summary.text_tokens <= len(both_ids())  # the speech's limit may come before the text's end


def both_ids() -> list[int]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tts_checkpoint(KINDS["base"]))
    return tokenizer(TEXT)["input_ids"]


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("text.voice_sample", start(seconds=0)),
        ("text.voice_sample.samples", start(seconds=0.5)),
        ("text.voice_sample.samples", start(seconds=30.5)),
        ("text.language", start(language="klingon")),
        ("text.language", start(language="beijing_dialect")),
        ("text.instructions", start(instructions="Whisper.")),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(
    cloning: ServedTalker, field: str, wrong: talker_pb2.SpeakStart
) -> None:
    with pytest.raises(InvalidInput) as error:
        await cloning.call(wrong)
    assert error.value.field == field
    assert (await cloning.call(start(language="English")))[1].frames == FRAMES


@pytest.mark.parametrize(
    "samples",
    [
        torch.zeros(RATE_HZ, dtype=torch.int16),
        torch.zeros(1, RATE_HZ),
        torch.full((RATE_HZ,), torch.nan),
        torch.full((RATE_HZ,), 2.0),
    ],
)
async def test_a_sample_that_is_no_sound_is_refused(cloning: ServedTalker, samples: torch.Tensor) -> None:
    wrong = start()
    wrong.text.voice_sample.samples.CopyFrom(to_message(samples))
    with pytest.raises(InvalidInput) as error:
        await cloning.call(wrong)
    assert error.value.field == "text.voice_sample.samples"


def test_a_checkpoint_that_does_not_run_here_is_refused(tmp_path: Path) -> None:
    import json
    import shutil

    folder = shutil.copytree(tts_checkpoint(KINDS["base"]), tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    for wrong, message in (
        ({"tokenizer_type": "qwen3_tts_tokenizer_25hz"}, "tokenizer_type"),
        ({"talker_config": {**config["talker_config"], "use_sliding_window": True}}, "use_sliding_window"),
        ({"tts_bos_token_id": None, "talker_config": {}}, r"config\.json: talker_config\.\w+ is missing"),
    ):
        (folder / "config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(ValueError, match=message):
            load_talker(str(folder), torch.device("cpu"))
