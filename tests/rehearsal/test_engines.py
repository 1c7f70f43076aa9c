"""Engines through their real threads on a fake GPU: how often the host waits, where, and on which device they work."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.code2wav.engine import DecodeEngine
from services.code2wav.stream import DecodeEnd, Event, Samples, Stream
from services.common.engine.device import CudaGraphs, make_current
from services.families.qwen2_5_omni.code2wav import DTYPES
from services.families.qwen3_tts.voice_sample import load_sample_reader
from services.registry import read_config
from services.talker import graphs
from services.talker.__main__ import warm_up
from services.talker.attention import PromptChunk
from services.talker.engine import TalkerEngine
from services.talker.execution import cache_attention
from services.talker.family import TalkerSpec
from services.talker.inputs import Prompt, States, Text
from services.talker.moe import grouped_experts
from services.talker.runner import StepInput, TalkerRunner
from services.talker.sampling import resolve
from services.talker.speech import SpeechRequest
from services.talker.voices import Voices
from tests.rehearsal.support import models
from tests.rehearsal.support.gpu import fake_gpu
from tests.support.weights.checkpoints import tts_checkpoint

pytestmark = pytest.mark.long
PROMPT, FRAMES, SPEECHES = 700, 3, 3
SECOND = torch.device("cuda", 1)


def shallow(spec: TalkerSpec) -> TalkerSpec:
    """One layer each: waits do not depend on their number."""
    predictor = spec.predictor and replace(spec.predictor, layers=1)
    return replace(spec, talker=replace(spec.talker, layers=1), predictor=predictor)


@pytest.fixture
def one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the largest step is captured, and runs."""
    shapes = graphs.StepGraphs._shapes
    monkeypatch.setattr(graphs.StepGraphs, "_shapes", lambda self: [next(shapes(self))])
    monkeypatch.setattr(graphs.StepGraphs, "_covering", lambda self, shape: next(iter(self._captured)))


def request(spec: TalkerSpec, seed: int) -> SpeechRequest:
    states = None
    if spec.state_width:
        rows = torch.zeros(PROMPT, spec.state_width, dtype=torch.bfloat16)
        states = States("hidden_states", [rows], torch.arange(PROMPT), torch.arange(PROMPT))
    positions = torch.arange(PROMPT)[:, None].expand(-1, 3)
    prompt = Prompt(torch.full((PROMPT,), 5), torch.full((PROMPT,), -1), positions, states=states)
    sampling = resolve(spec.defaults, seed=seed, max_frames=FRAMES, top_k=50)
    text_states = torch.zeros(4, spec.state_width or 0, dtype=torch.bfloat16) if spec.text_has_states else None
    return SpeechRequest(prompt, Text(range(5, 9), text_states), sampling)


async def speak(engine: TalkerEngine, seed: int) -> int:
    speech = engine.submit(request(engine.spec, seed))
    speech.finish_text()
    return sum([len(frames) async for frames in speech.frames()])


class CountingRunner(TalkerRunner):
    """Counts its pieces of prompts and its steps."""

    pieces = steps = 0

    def prefill(self, chunks: Sequence[PromptChunk]) -> None:
        self.pieces += 1
        super().prefill(chunks)

    def step(self, batch: Sequence[StepInput]) -> torch.Tensor:
        self.steps += 1
        return super().step(batch)


def talker_waits(runner: CountingRunner, has_states: bool) -> dict[str, int]:
    """The waits that there may be. Those of an admission come while no step runs."""
    waits = {
        "services/talker/runner.py step": runner.steps,
        "services/talker/runner.py prefill": runner.pieces,
        "services/talker/model.py embed": (5 if has_states else 4) * SPEECHES,
    }
    return waits | ({"services/talker/engine.py _admit": SPEECHES} if has_states else {})


@pytest.mark.parametrize("name", ["qwen3-omni-30b", "qwen2.5-omni-7b", "qwen3-tts-1.7b"])
@pytest.mark.usefixtures("one_shape")
async def test_a_talker_speaks(name: str, monkeypatch: pytest.MonkeyPatch):
    """Its device is not the one that is current in new threads."""
    monkeypatch.setattr(models, "talker_spec", lambda name, spec=models.talker_spec: shallow(spec(name)))
    with fake_gpu(devices=2) as gpu:
        make_current(SECOND)
        model = models.talker(name, torch.bfloat16, grouped_experts, SECOND)
        runner = CountingRunner(model, 4, 1024, CudaGraphs(SECOND), attention=cache_attention(None))
        engine = TalkerEngine(runner)
        await warm_up(engine)
        gpu.ledger.clear()
        runner.pieces = runner.steps = 0
        frames = await asyncio.gather(*(speak(engine, seed) for seed in range(SPEECHES)))
        engine.stop()
    assert frames == [FRAMES] * SPEECHES
    assert set(gpu.ledger.attention) == {"in place"}  # the only ones outside of captures: prompts
    assert gpu.ledger.waits() == talker_waits(runner, has_states=bool(engine.spec.state_width))
    assert not gpu.ledger.faults()
    assert {index for _, index in gpu.ledger.devices} == {1}


class CountingDecodes:
    """Counts the steps and flushes of a decoder."""

    def __init__(self, engine: DecodeEngine) -> None:
        self.steps = 0
        self._step, engine._step = engine._step, self.step

    def step(self, streams: Sequence[Stream], codes: torch.Tensor | None) -> None:
        self.steps += 1
        self._step(streams, codes)


def shallow_token2wav(whole: dict[str, Any]) -> dict[str, Any]:
    """Two layers of the transformer: one that looks back, and one that does not."""
    part: dict[str, Any] = whole["token2wav_config"]
    layers = {"num_hidden_layers": 2, "look_backward_layers": [0], "look_ahead_layers": []}
    return whole | {"token2wav_config": part | {"dit_config": part["dit_config"] | layers}}


async def decode(engine: DecodeEngine, frames: int) -> int:
    """The samples of a stream of `frames` frames."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    stream = engine.open(lambda event: loop.call_soon_threadsafe(events.put_nowait, event))
    engine.put(stream, torch.zeros(frames, engine.spec.num_code_groups, dtype=torch.int64))
    engine.finish(stream)
    samples = 0
    while not isinstance(event := await events.get(), DecodeEnd):
        assert isinstance(event, Samples), event
        samples += len(event.samples)
    return samples


@pytest.mark.parametrize("name", ["qwen3-omni-30b", "qwen3-tts-1.7b"])
async def test_a_wave_decoder_decodes(name: str):
    with fake_gpu(devices=2) as gpu:
        make_current(SECOND)
        made = models.decoder(name, torch.bfloat16, SECOND)
        engine = DecodeEngine(made, max_streams=2, max_frames_per_step=2, capturer=CudaGraphs(SECOND))
        counted = CountingDecodes(engine)
        gpu.ledger.clear()
        samples = await asyncio.gather(*(decode(engine, 5) for _ in range(2)))
        engine.stop()
    assert samples == [5 * made.spec.samples_per_frame - made.spec.trimmed_samples] * 2
    assert gpu.ledger.waits() == {
        "services/code2wav/engine.py _step": counted.steps,  # codes, to the device
        "services/code2wav/causal.py step": counted.steps,  # slots and positions, to the device
        "services/code2wav/causal.py cut": counted.steps,  # samples, to the host
    }
    assert not gpu.ledger.faults()
    assert {index for _, index in gpu.ledger.devices} == {1}


async def test_a_decoder_of_windows_decodes(monkeypatch: pytest.MonkeyPatch):
    """After the start no convolution has a shape that cuDNN would have to plan for."""
    monkeypatch.setattr(models, "config", lambda name, read=models.config: shallow_token2wav(read(name)))
    with fake_gpu(devices=2) as gpu:
        make_current(SECOND)
        made = models.decoder("qwen2.5-omni-7b", DTYPES["cuda"], SECOND)
        engine = DecodeEngine(made, max_streams=1, max_frames_per_step=16, capturer=CudaGraphs(SECOND))
        gpu.ledger.clear()
        samples = await decode(engine, 55)
        engine.stop()
    assert samples == 55 * made.spec.samples_per_frame
    windows = 3  # of 24 codes, 12 and the rest
    assert gpu.ledger.waits() == {
        "services/code2wav/engine.py _step": windows,  # codes, to the device
        "services/families/qwen2_5_omni/token2wav/flow.py mel": windows,  # noise
        "services/families/qwen2_5_omni/token2wav/blocks.py to": windows,
        "services/families/qwen2_5_omni/token2wav/pieces.py _run": 2 + 1 + 3,  # slots and places, to each pass
        "services/families/qwen2_5_omni/code2wav.py _decode": windows,  # samples, to the host
    }
    assert not gpu.ledger.convolutions
    assert not gpu.ledger.faults()
    assert {index for _, index in gpu.ledger.devices} == {1}


async def test_a_voice_sample_waits_for_no_frame():
    """It has a stream of its own, and its encoder's paddings are read on the host."""
    folder = tts_checkpoint("qwen3-tts-base")
    with fake_gpu(devices=2) as gpu:
        make_current(SECOND)
        reader = load_sample_reader(read_config(folder), folder, SECOND, torch.bfloat16)
        make_current(torch.device("cuda", 0))
        voices = Voices(reader, SECOND)
        gpu.ledger.clear()
        voice = await voices.voice(torch.zeros(2 * reader.sample_rate_hz))
    assert (voice.vector.device.type, voice.frames.device.type) == ("cpu", "cpu")
    assert gpu.ledger.waits() == {
        "services/families/qwen3_tts/voice_sample.py read": 3,  # the sound; the vector and the codes
        "services/families/qwen3_tts/voice_sample.py mel_spectrogram": 1,  # filters
    }
    assert not gpu.ledger.faults()
    assert {index for _, index in gpu.ledger.devices} == {1}
