"""Qwen2.5-Omni's talker draws transformers' codes from the thinker's states: alone, together, when they come late."""

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.errors import InvalidInput
from services.common.stream.rows import ROPE_POSITIONS, TOKEN_IDS, Rows
from services.talker.answer import AnswerRows
from services.talker.engine import TalkerEngine
from services.talker.model import load_talker
from services.talker.runner import TalkerRunner
from services.talker.sampling import resolve
from services.talker.speech import Speech, SpeechRequest
from tests.support.references.qwen2_5_omni import Qwen25Reference
from tests.support.references.qwen3_omni import ReferenceAnswer
from tests.support.samples.conversations import CONVERSATIONS, sound, turn, video
from tests.support.stage.replay import ReplayedOps
from tests.support.stage.talker import codes_of
from tests.support.weights.checkpoints import omni_checkpoint

MAX_TOKENS, MAX_FRAMES, POSITIONS = 12, 40, 1024
WITH_SOUND = "video with sound"
CASES = CONVERSATIONS | {WITH_SOUND: [turn("user", video(), sound(2.0), "What happens?")]}


class Setup:
    """A checkpoint in both implementations."""

    def __init__(self, checkpoint: Path) -> None:
        self.reference = Qwen25Reference(checkpoint)
        self.family, self.model = load_talker(str(checkpoint), torch.device("cpu"), torch.float32)
        text_model = self.reference.model.thinker.model
        self.layer = len(getattr(text_model, "language_model", text_model).layers)  # newer ones have the former
        self.answer = cache(self._answer)

    def _answer(self, name: str) -> ReferenceAnswer:
        heard = name == WITH_SOUND
        return self.reference.answer(
            CASES[name], MAX_TOKENS, MAX_FRAMES, layers=(self.layer,), use_audio_in_video=heard
        )

    def input(self, name: str, voice: str = "Chelsie") -> AnswerRows:
        """A collector that has the whole prompt, and no answer yet."""
        assert self.family.thinker_input
        answer, collector = self.answer(name), self.family.thinker_input(voice)
        prompt = len(answer.prompt_ids)
        collector.begin(prompt)
        collector.add(Rows(TOKEN_IDS, 0, torch.from_numpy(answer.prompt_ids)))
        collector.add(Rows(ROPE_POSITIONS, 0, answer.rope_positions))
        collector.add(Rows(f"hidden_states.{self.layer}", 0, answer.hidden_states[self.layer][:prompt]))
        return collector

    def add(self, collector: AnswerRows, name: str, first: int, end: int) -> None:
        """Adds tokens `first` to `end` of the answer, and the states of those that have one."""
        answer = self.answer(name)
        prompt, states = len(answer.prompt_ids), answer.hidden_states[self.layer]
        collector.add(Rows(TOKEN_IDS, prompt + first, torch.tensor(answer.token_ids[first:end])))
        collector.add(Rows(f"hidden_states.{self.layer}", prompt + first, states[prompt + first : prompt + end]))

    def submit(self, engine: TalkerEngine, collector: AnswerRows) -> Speech:
        assert collector.ready
        sampling = resolve(self.model.spec.defaults, temperature=0, max_frames=MAX_FRAMES)
        return engine.submit(SpeechRequest(collector.take_prompt(), collector.take_text(), sampling))


@pytest.fixture(scope="module", params=["tiny", pytest.param("small", marks=pytest.mark.long)])
def setup(request: pytest.FixtureRequest) -> Setup:
    return Setup(omni_checkpoint(request.param, arch="qwen2.5-omni"))


@pytest.fixture
async def engine(setup: Setup) -> AsyncIterator[TalkerEngine]:
    engine = TalkerEngine(TalkerRunner(setup.model, 4, POSITIONS))
    yield engine
    engine.stop()


async def say(setup: Setup, engine: TalkerEngine, name: str) -> np.ndarray:
    collector = setup.input(name)
    setup.add(collector, name, 0, MAX_TOKENS)
    speech = setup.submit(engine, collector)
    speech.finish_text()
    return await codes_of(speech)


@pytest.mark.parametrize("name", CASES)
async def test_codes_equal_the_references(setup: Setup, engine: TalkerEngine, name: str) -> None:
    expected = setup.answer(name).codes
    assert len(expected) > 0
    np.testing.assert_array_equal(await say(setup, engine, name), expected)


async def test_a_batch_with_more_requests_than_slots_and_captured_steps(setup: Setup) -> None:
    engine = TalkerEngine(TalkerRunner(setup.model, 4, POSITIONS, ReplayedOps()), prefill_chunk=48)
    said = await asyncio.gather(*[say(setup, engine, name) for name in CASES])
    for name, codes in zip(CASES, said, strict=True):
        np.testing.assert_array_equal(codes, setup.answer(name).codes, err_msg=name)
    engine.stop()


async def test_states_that_come_late_park_the_speech_and_change_nothing(setup: Setup, engine: TalkerEngine) -> None:
    name = "turns with media"
    expected, collector = setup.answer(name).codes, setup.input(name)
    assert not collector.ready
    setup.add(collector, name, 0, 1)
    speech = setup.submit(engine, collector)
    frames = speech.frames()
    parts = [await asyncio.wait_for(anext(frames), 60)]  # with one token there is one frame
    assert len(parts[0]) == 1
    for token in range(1, len(setup.answer(name).token_ids)):
        setup.add(collector, name, token, token + 1)
        speech.feed(collector.take_text())
    speech.finish_text()
    parts += [part async for part in frames]
    np.testing.assert_array_equal(torch.cat(parts).numpy(), expected)


async def test_the_token_that_an_answer_is_cut_after_has_no_state_and_is_not_said(
    setup: Setup, engine: TalkerEngine
) -> None:
    name = next(name for name in CASES if len(setup.answer(name).token_ids) == MAX_TOKENS)
    collector = setup.input(name)
    setup.add(collector, name, 0, MAX_TOKENS)
    text = collector.take_text()
    assert len(text.ids) == MAX_TOKENS - 1
    assert text.states is not None
    assert len(text.states) == MAX_TOKENS - 1


def test_an_answer_without_a_state_says_nothing(setup: Setup) -> None:
    collector = setup.input("text")
    assert collector.is_empty
    answer = setup.answer("text")
    collector.add(Rows(TOKEN_IDS, len(answer.prompt_ids), torch.tensor(answer.token_ids[:1])))
    assert collector.is_empty
    assert not collector.ready


def test_a_voice_is_a_row_of_the_prompt(setup: Setup) -> None:
    """The reference draws the same codes with each, as the random talker hardly hears one row of a hundred."""
    assert setup.model.spec.speakers == ("Chelsie", "Ethan")
    rows = []
    for voice in setup.model.spec.speakers:
        collector = setup.input("text", voice)
        setup.add(collector, "text", 0, MAX_TOKENS)
        rows.append(collector.take_prompt().text_ids)
    ids = [setup.reference.model.speaker_map[voice]["bos_token"] for voice in setup.model.spec.speakers]
    assert [int(row[-2]) for row in rows] == ids
    assert torch.equal(rows[0][:-2], rows[1][:-2])


def test_states_that_do_not_fit_are_refused(setup: Setup) -> None:
    answer, name = setup.answer("text"), f"hidden_states.{setup.layer}"
    prompt, width = len(answer.prompt_ids), answer.hidden_states[setup.layer].shape[1]

    def refused(match: str, first: int, states: torch.Tensor) -> None:
        collector = setup.input("text")
        collector.add(Rows(TOKEN_IDS, prompt, torch.tensor([20, 21])))
        with pytest.raises(InvalidInput, match=match):
            collector.add(Rows(name, first, states))

    refused("before the token ids", prompt, torch.zeros(3, width))
    refused("missing", prompt + 1, torch.zeros(1, width))
    refused("shape", prompt, torch.zeros(1, width + 1))
    refused("finite", prompt, torch.full((1, width), torch.nan))
