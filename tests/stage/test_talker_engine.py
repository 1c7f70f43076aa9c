"""The talker's engine says, code for code, what transformers' talker says: alone, together, and whatever comes late."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.engine.device import CapturedRun, Capturer, CudaGraphs, engine_device
from services.common.errors import InvalidInput, StageError
from services.families.qwen3_omni.talker_prompt import PromptSpec, ThinkerPrompt, is_media, talker_prompt
from services.talker.attention import SDPA, CacheAttention, DecodeAttention
from services.talker.engine import TalkerEngine
from services.talker.inputs import Prompt, Text
from services.talker.model import TalkerModel, empty_model, load_talker
from services.talker.moe import grouped_experts, static_experts
from services.talker.predictor import CodePredictor
from services.talker.runner import TalkerRunner
from services.talker.sampling import PREPARED_WIDTHS, resolve
from services.talker.speech import SpeechRequest
from services.talker.varlen import in_place_attention
from tests.support.references.qwen3_omni import Reference, ReferenceAnswer
from tests.support.references.varlen import varlen_attn
from tests.support.samples.conversations import CONVERSATIONS, read_prompt_spec
from tests.support.stage.replay import ReplayedOps
from tests.support.stage.talker import codes_of

MAX_TOKENS, MAX_FRAMES, POSITIONS = 12, 16, 1024
IN_PLACE = in_place_attention(varlen_attn, DecodeAttention)


class Setup:
    """A checkpoint in both implementations."""

    def __init__(self, checkpoint: Path) -> None:
        self.reference = Reference(checkpoint)
        self.family, self.model = load_talker(str(checkpoint), torch.device("cpu"), torch.float32)
        self.spec = self.model.spec
        self.prompt_spec = read_prompt_spec(checkpoint)
        self.answer = cache(self._answer)

    def _answer(self, name: str) -> ReferenceAnswer:
        layers = (self.prompt_spec.state_layer,)
        return self.reference.answer(CONVERSATIONS[name], MAX_TOKENS, MAX_FRAMES, layers=layers)

    def request(self, name: str, first_tokens: int | None = None, **sampling: float | int) -> SpeechRequest:
        answer, speaker = self.answer(name), self.spec.speakers[0]
        ids = torch.from_numpy(answer.prompt_ids)
        states = answer.hidden_states[self.prompt_spec.state_layer][: len(ids)][is_media(ids, self.prompt_spec)]
        prompt = ThinkerPrompt(ids, (states,), answer.rope_positions)
        rules = resolve(self.spec.defaults, **{"temperature": 0, "max_frames": MAX_FRAMES, **sampling})
        return SpeechRequest(
            prompt=talker_prompt(prompt, answer.token_ids[0], speaker, self.prompt_spec),
            text=Text(answer.token_ids[:first_tokens]),
            sampling=rules,
        )

    def engine(self, slots: int = 4, **arguments) -> TalkerEngine:
        return TalkerEngine(TalkerRunner(self.model, slots, POSITIONS), **arguments)


def _short_prompt(model: TalkerModel, spec: PromptSpec, first_text_id: int) -> Prompt:
    ids = [spec.im_start_id, spec.user_id, 20, 21, spec.im_start_id, spec.assistant_id, 22]
    return talker_prompt(ThinkerPrompt(torch.tensor(ids), (), None), first_text_id, model.spec.speakers[0], spec)


@pytest.fixture(scope="module", params=["tiny_checkpoint", "small_checkpoint"])
def setup(request: pytest.FixtureRequest) -> Setup:
    return Setup(request.getfixturevalue(request.param))


@pytest.fixture
async def engine(setup: Setup):
    engine = setup.engine()
    yield engine
    engine.stop()


async def _next(frames: AsyncIterator[torch.Tensor]) -> AsyncIterator[torch.Tensor]:
    """The next frames, or nothing once speech has ended."""
    if (part := await anext(frames, None)) is not None:
        yield part


async def _say(engine: TalkerEngine, request: SpeechRequest) -> np.ndarray:
    speech = engine.submit(request)
    speech.finish_text()
    return await codes_of(speech)


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_codes_equal_the_references(setup: Setup, engine: TalkerEngine, name: str) -> None:
    expected = setup.answer(name).codes
    codes = await _say(engine, setup.request(name))
    assert len(expected) > 0
    np.testing.assert_array_equal(codes, expected)


async def test_prefill_in_chunks_changes_nothing(setup: Setup) -> None:
    engine = setup.engine(prefill_chunk=7)
    np.testing.assert_array_equal(
        await _say(engine, setup.request("turns with media")), setup.answer("turns with media").codes
    )
    engine.stop()


async def test_a_batch_with_late_joins_and_more_requests_than_slots(setup: Setup, engine: TalkerEngine) -> None:
    async def join(index: int, name: str) -> np.ndarray:
        await asyncio.sleep(0.02 * index)
        return await _say(engine, setup.request(name))

    said = await asyncio.gather(*[join(i, name) for i, name in enumerate(CONVERSATIONS)])
    for name, codes in zip(CONVERSATIONS, said, strict=True):
        np.testing.assert_array_equal(codes, setup.answer(name).codes, err_msg=name)
    assert len(engine._free) == 4


async def test_late_text_gives_the_same_codes_and_holds_nobody_up(setup: Setup, engine: TalkerEngine) -> None:
    late = engine.submit(setup.request("image", first_tokens=1))
    frames = late.frames()
    first = await anext(frames)
    assert len(first) == 1
    np.testing.assert_array_equal(await _say(engine, setup.request("text")), setup.answer("text").codes)
    parts = [first.numpy()]
    for token in setup.answer("image").token_ids[1:]:
        late.feed(Text([token]))
        parts += [part.numpy() async for part in _next(frames)]
    late.finish_text()
    parts += [part.numpy() async for part in frames]
    np.testing.assert_array_equal(np.concatenate(parts), setup.answer("image").codes)
    assert late.waiting.waited_ms > 0


async def test_seeded_codes_do_not_depend_on_the_batch(setup: Setup, engine: TalkerEngine) -> None:
    rules: dict[str, Any] = {"temperature": 0.9, "predictor_temperature": 1.0}
    alone = [await _say(engine, setup.request("text", seed=seed, **rules)) for seed in (1, 2, 3)]
    requests = [setup.request("text", seed=seed, **rules) for seed in (1, 2, 3)]
    together = await asyncio.gather(_say(engine, setup.request("chinese")), *[_say(engine, r) for r in requests])
    for one, other in zip(alone, together[1:], strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(alone[0], alone[1])
    np.testing.assert_array_equal(together[0], setup.answer("chinese").codes)


async def test_cancel_frees_the_slot(setup: Setup) -> None:
    engine = setup.engine(slots=1)
    parked = engine.submit(setup.request("text", first_tokens=1))
    await anext(parked.frames())
    assert len(engine._free) == 0
    parked.cancel()
    np.testing.assert_array_equal(await _say(engine, setup.request("text")), setup.answer("text").codes)
    assert len(engine._free) == 1
    engine.stop()


async def test_max_frames_counts_frames(setup: Setup, engine: TalkerEngine) -> None:
    speech = engine.submit(setup.request("text", max_frames=3))
    speech.finish_text()
    codes = await codes_of(speech)
    np.testing.assert_array_equal(codes, setup.answer("text").codes[:3])
    assert speech.end == "length"


async def test_a_full_slot_ends_speech_and_a_longer_prompt_is_refused(setup: Setup) -> None:
    request = setup.request("text")
    length = len(setup.answer("text").prompt_ids) + 6  # a text-only prompt of one user turn gains six rows
    engine = TalkerEngine(TalkerRunner(setup.model, 1, length + 2))
    speech = engine.submit(request)
    speech.finish_text()
    assert len(await codes_of(speech)) == 3
    assert speech.end == "length"
    engine.stop()
    engine = TalkerEngine(TalkerRunner(setup.model, 1, length - 1))
    with pytest.raises(InvalidInput, match="positions"):
        engine.submit(request)
    engine.stop()


async def test_a_broken_engine_tells_every_request(setup: Setup) -> None:
    loop = asyncio.get_running_loop()
    failure: asyncio.Future[BaseException] = loop.create_future()
    engine = setup.engine(slots=1, on_fatal=lambda error: loop.call_soon_threadsafe(failure.set_result, error))
    parked = engine.submit(setup.request("text", first_tokens=1))
    await anext(parked.frames())
    out_of_table = replace(setup.request("text"), text=Text([setup.model.text_table.shape[0]]))
    broken = engine.submit(out_of_table)
    parked.feed(Text([setup.model.text_table.shape[0]]))
    for speech in (parked, broken):
        with pytest.raises(StageError, match="failed"):
            await codes_of(speech)
    assert isinstance(await asyncio.wait_for(failure, 60), IndexError)
    with pytest.raises(StageError, match="stopped"):
        engine.submit(setup.request("text"))


@pytest.mark.parametrize("setup", ["small_checkpoint"], indirect=True)  # smaller batches are on both
async def test_a_batch_of_32_says_what_32_single_runs_say(setup: Setup) -> None:
    names = list(CONVERSATIONS)
    rules: dict[str, Any] = {"temperature": 0.9, "predictor_temperature": 1.0, "repetition_penalty": 1.05}
    requests = [setup.request(names[i % len(names)], seed=i, **(rules if i % 2 else {})) for i in range(32)]
    engine = setup.engine(slots=32)
    together = await asyncio.gather(*[_say(engine, request) for request in requests])
    alone = [
        await _say(engine, request) if i % 2 else setup.answer(names[i % len(names)]).codes
        for i, request in enumerate(requests)
    ]
    engine.stop()
    for i, (one, other) in enumerate(zip(alone, together, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=f"request {i}")
    assert sum(map(len, together)) > 32 * 4


async def test_a_reader_that_stops_holds_up_its_own_speech_only(setup: Setup) -> None:
    engine = setup.engine(slots=2, max_frames_ahead=4)
    unread = engine.submit(setup.request("image"))
    unread.finish_text()
    expected = setup.answer("image").codes
    assert len(expected) > 4
    np.testing.assert_array_equal(await _say(engine, setup.request("text")), setup.answer("text").codes)
    assert unread.frames_made == 4
    np.testing.assert_array_equal(await codes_of(unread), expected)
    engine.stop()


async def test_requests_move_down_when_the_slots_below_are_free(setup: Setup) -> None:
    engine = setup.engine(slots=8)
    requests = [setup.request("text", max_frames=2) for _ in range(7)] + [setup.request("image", first_tokens=2)]
    with engine.changed:  # the engine hears of all at once: each gets a slot of its own
        *short, last = [engine.submit(request) for request in requests]
    for speech in short:
        speech.finish_text()
        await codes_of(speech)
    last.feed(Text(setup.answer("image").token_ids[2:]))
    last.finish_text()
    np.testing.assert_array_equal(await codes_of(last), setup.answer("image").codes)
    assert last.slot == 0
    assert len(engine._free) == 8
    engine.stop()


@torch.inference_mode()
def _with_few_groups(whole: TalkerModel) -> TalkerModel:
    """A random talker of fewer code groups: a small program to compile."""
    model = empty_model(replace(whole.spec, num_code_groups=4), whole.device, whole.dtype)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.text_table = torch.randn(whole.text_table.shape, generator=generator)
    model.precompute()
    return model


@pytest.mark.long
async def test_a_compiled_predictor_says_what_an_eager_one_says(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a thinker's engine in this process may have turned the compiler off before
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    model = _with_few_groups(load_talker(str(tiny_checkpoint), torch.device("cpu"), torch.float32)[1])
    spec, slots = model.spec, 5
    prompt = _short_prompt(model, read_prompt_spec(tiny_checkpoint), 30)
    requests = [
        SpeechRequest(
            prompt,
            Text(range(30, 40 + i)),
            # greedy, random, and the last keeps more codes than any compiled width
            resolve(
                spec.defaults,
                seed=i,
                max_frames=8 + i,
                temperature=0.9 * (i % 2),
                predictor_temperature=0.9 * (i % 2 or i == slots - 1),
                predictor_top_k=99 if i == slots - 1 else 50,
            ),
        )
        for i in range(slots)
    ]
    said = []
    for compiled in (False, True):
        engine = TalkerEngine(TalkerRunner(model, slots, POSITIONS, compiled=compiled))
        programs = _programs()
        together = await asyncio.gather(*[_say(engine, request) for request in requests])
        alone = [await _say(engine, request) for request in requests]
        said += [together, alone]
        assert _programs() == programs  # nothing is compiled while requests wait
        engine.stop()
    assert programs == len(PREPARED_WIDTHS)
    assert all(len(codes) for codes in said[0])
    for others in said[1:]:
        for expected, codes in zip(said[0], others, strict=True):
            np.testing.assert_array_equal(codes, expected)


def _programs() -> int:
    """Programs that torch has compiled of the code predictor."""
    return len(torch._dynamo.eval_frame._debug_get_cache_entry_list(CodePredictor.forward.__code__))


@pytest.mark.parametrize("setup", ["small_checkpoint"], indirect=True)  # the next test has the tiny one's
@pytest.mark.parametrize(("attention", "piece"), [(SDPA, 512), (IN_PLACE, 48)], ids=["SDPA", "in place"])
async def test_captured_steps_with_static_experts_give_the_references_codes(
    setup: Setup, attention: CacheAttention, piece: int
) -> None:
    """What a GPU runs: recorded operators on static tensors, spoilt before each step, in a batch of other sizes."""
    setup.model.use_experts(static_experts)
    runner = TalkerRunner(setup.model, 4, POSITIONS, ReplayedOps(), attention=attention)
    engine = TalkerEngine(runner, prefill_chunk=piece)
    requests = [setup.request(name) for name in CONVERSATIONS]
    for name, codes in zip(
        CONVERSATIONS, await asyncio.gather(*[_say(engine, request) for request in requests]), strict=True
    ):
        np.testing.assert_array_equal(codes, setup.answer(name).codes)
    engine.stop()
    setup.model.use_experts(grouped_experts)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_captured_steps_say_what_eager_steps_say(tiny_checkpoint: Path, device: str) -> None:
    """Greedy, random and wide rows together; nothing is captured, and no step runs eagerly, once requests come."""
    on = engine_device(device)
    _, model = load_talker(str(tiny_checkpoint), on, torch.float32)
    spec = model.spec
    model.use_experts(static_experts)
    prompt = _short_prompt(model, read_prompt_spec(tiny_checkpoint), 30)
    rules = [{"temperature": 0}, {"temperature": 0.9}, {"temperature": 0}, {"top_k": 0}, {"predictor_top_k": 200}]
    requests = [
        SpeechRequest(
            prompt,
            Text(range(30, 40 + i)),
            resolve(spec.defaults, seed=i, max_frames=12 + i, **rule),
        )
        for i, rule in enumerate(rules)
    ]
    capturer = _Counting(CudaGraphs(on) if device == "cuda" else ReplayedOps())
    said = []
    counts = []
    for attention, steps in ((SDPA, None), (SDPA, capturer), (IN_PLACE, capturer)):
        engine = TalkerEngine(TalkerRunner(model, 5, 600, steps, attention=attention))
        captures, runs = capturer.captures, capturer.runs
        counts.append(captures)
        said.append(await asyncio.gather(*[_say(engine, request) for request in requests]))
        said.append([await _say(engine, request) for request in requests])
        engine.stop()
        assert (capturer.captures, capturer.runs) == (captures, runs)
    # 5, 4, 2 and 1 rows: all codes for 600 and 256 positions, usual ones for 600, 512 and 256; in place, for all.
    assert counts == [0, 4 * (2 + 3), 4 * (2 + 3 + 1 + 1)]
    eager, *others = said
    assert all(len(codes) for codes in eager)
    for codes in others:
        for expected, actual in zip(eager, codes, strict=True):
            np.testing.assert_array_equal(actual, expected)


class _Counting:
    """Counts captures, and how often what was captured ran otherwise than by a replay."""

    def __init__(self, capturer: Capturer) -> None:
        self._capturer, self.captures, self.runs = capturer, 0, 0

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        def counted() -> torch.Tensor:
            self.runs += 1
            return run()

        self.captures += 1
        return self._capturer.capture(counted)
