"""Every step that is captured as a CUDA graph, at published sizes: no wait, no copy, no host work, no MATH attention,
and as many kernels and bytes as were recorded."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from services.common.engine.device import Accelerator, CapturedRun, CudaGraphs
from services.families.qwen2_5_omni.code2wav import Token2Wav
from services.families.qwen2_5_omni.token2wav import pieces
from services.talker import graphs
from services.talker.attention import PromptChunk
from services.talker.execution import cache_attention, experts
from services.talker.runner import TalkerRunner
from tests.rehearsal.support import goldens
from tests.rehearsal.support.gpu import FakeGpu, fake_gpu
from tests.rehearsal.support.models import CUDA, decoder, talker

pytestmark = pytest.mark.long
ARCHITECTURES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
TALKERS = ("qwen3-omni-30b", "qwen2.5-omni-7b", "qwen3-tts-1.7b")
DECODERS = ("qwen3-omni-30b", "qwen3-tts-1.7b")
SLOTS, POSITIONS, PIECE = 8, 8192, 512
DECODERS_SHAPES = 4 * 5  # 1 to 8 streams, 1 to 16 frames


def paths() -> Iterator[tuple[str, str, str]]:
    """(talker, dtype, how experts run), for all architectures: talkers without experts have one path a dtype."""
    for name, dtype in itertools.product(TALKERS, ("bfloat16", "float32")):
        accelerators = [Accelerator("", capability, 0) for capability in ARCHITECTURES]
        ways = {experts(accelerator, dtype).__name__ for accelerator in accelerators}
        for way in sorted(ways) if name.startswith("qwen3-omni") else ["static_experts"]:
            yield name, dtype, way


def no_faults(gpu: FakeGpu) -> None:
    faults = gpu.ledger.faults()
    assert not faults, "\n".join(faults)


@pytest.fixture
def largest_and_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = graphs.StepGraphs._shapes

    def two(self: graphs.StepGraphs) -> Iterator[graphs.StepShape]:
        all_shapes = list(shapes(self))
        yield from (all_shapes[0], all_shapes[-1])

    monkeypatch.setattr(graphs.StepGraphs, "_shapes", two)


class LargestAndSmallest:
    """Captures the first and the last function of `count`: all shapes of a decoder's steps have the same operators."""

    def __init__(self, count: int) -> None:
        self._graphs, self._count, self.seen = CudaGraphs(CUDA), count, 0

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        self.seen += 1
        if self.seen in (1, self._count):
            return self._graphs.capture(run)
        return CapturedRun(lambda: None, torch.empty(0))


@pytest.mark.parametrize(("name", "dtype", "way"), [path for path in paths() if path[1] == "bfloat16"])
@pytest.mark.usefixtures("largest_and_smallest")
def test_a_talker_s_steps_of_fused_kernels(name: str, dtype: str, way: str):
    """And its prompts: what sm_80 and newer run."""
    pytest.importorskip("triton")
    from services.talker.kernels.stack import FUSED

    run_experts = next(
        run for run in (experts(None, dtype), experts(Accelerator("", (8, 0), 0), dtype)) if run.__name__ == way
    )
    label = f"{name} talker, {dtype}, {way}, fused"
    with fake_gpu() as gpu, torch.inference_mode():
        model = talker(name, getattr(torch, dtype), run_experts)
        gpu.ledger.clear()
        runner = TalkerRunner(model, SLOTS, POSITIONS, CudaGraphs(CUDA), kernels=FUSED, attention=cache_attention(None))
        no_faults(gpu)
        largest, smallest = gpu.ledger.captures
        goldens.check(f"{label}, {SLOTS} rows of {POSITIONS} positions and all codes", largest)
        goldens.check(f"{label}, 1 row of {POSITIONS} positions", smallest)
        rows = torch.zeros(PIECE, model.spec.talker.hidden, dtype=model.dtype, device=CUDA)
        places = torch.zeros(PIECE, 3, dtype=torch.long)
        for slots in ((0,), (3, 1)):
            count = PIECE // len(slots)
            gpu.ledger.clear()
            runner.prefill([PromptChunk(slot, PIECE, PIECE + count, rows[:count], places[:count]) for slot in slots])
            no_faults(gpu)
            assert gpu.ledger.attention == {"in place": model.spec.talker.layers}
            goldens.check(f"{label}, {PIECE} positions of {len(slots)} longer prompts", gpu.ledger.work)


@pytest.mark.parametrize(("name", "dtype", "way"), list(paths()))
@pytest.mark.usefixtures("largest_and_smallest")
def test_a_talker_s_steps_and_prompts(name: str, dtype: str, way: str):
    run_experts = next(
        run for run in (experts(None, dtype), experts(Accelerator("", (8, 0), 0), dtype)) if run.__name__ == way
    )
    label = f"{name} talker, {dtype}, {way}"
    with fake_gpu() as gpu, torch.inference_mode():
        model = talker(name, getattr(torch, dtype), run_experts)
        gpu.ledger.clear()
        runner = TalkerRunner(model, SLOTS, POSITIONS, CudaGraphs(CUDA))
        no_faults(gpu)
        largest, smallest = gpu.ledger.captures
        goldens.check(f"{label}, {SLOTS} rows of {POSITIONS} positions and all codes", largest)
        goldens.check(f"{label}, 1 row of 256 positions", smallest)
        rows = torch.zeros(PIECE, model.spec.talker.hidden, dtype=model.dtype, device=CUDA)
        places = torch.zeros(PIECE, 3, dtype=torch.long)
        for begin in (0, PIECE):
            gpu.ledger.clear()
            runner.prefill([PromptChunk(0, begin, begin + PIECE, rows, places)])
            no_faults(gpu)
            goldens.check(f"{label}, prompt from {begin} to {begin + PIECE}", gpu.ledger.work)


@pytest.mark.parametrize(("name", "dtype"), list(itertools.product(DECODERS, ("bfloat16", "float32"))))
def test_a_wave_decoder_s_steps(name: str, dtype: str):
    with fake_gpu() as gpu, torch.inference_mode():
        made = decoder(name, getattr(torch, dtype))
        states = made.new_states(SLOTS)
        gpu.ledger.clear()
        capturer = LargestAndSmallest(DECODERS_SHAPES)
        made.captured_step(capturer, states, 16)
        assert capturer.seen == DECODERS_SHAPES
        no_faults(gpu)
        goldens.check(f"{name} code2wav, {dtype}, {SLOTS} streams of 16 frames", gpu.ledger.captures[0])
        goldens.check(f"{name} code2wav, {dtype}, 1 stream of 1 frame", gpu.ledger.captures[-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_token2wav_s_steps(dtype: str):
    with fake_gpu() as gpu, torch.inference_mode():
        made = decoder("qwen2.5-omni-7b", getattr(torch, dtype))
        assert isinstance(made, Token2Wav)
        gpu.ledger.clear()
        made.flow.capture(CudaGraphs(CUDA), most_blocks=1)
        no_faults(gpu)
        (step,) = gpu.ledger.captures
        goldens.check(f"qwen2.5-omni token2wav, {dtype}, 1 block", step)


def test_bigvgan_s_passes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pieces, "MOST_PIECES", 1)  # more are the same operators on longer signals
    with fake_gpu() as gpu, torch.inference_mode():
        made = decoder("qwen2.5-omni-7b", torch.bfloat16)
        assert isinstance(made, Token2Wav)
        gpu.ledger.clear()
        vocoder = pieces.PiecedVocoder(made.vocoder, CudaGraphs(CUDA), 1, made.sizes.block_size)
        no_faults(gpu)
        captured = dict(zip(vocoder._passes, gpu.ledger.captures, strict=True))
        goldens.check("qwen2.5-omni bigvgan, 1 piece within a signal", captured[1, 1])
        goldens.check("qwen2.5-omni bigvgan, 1 piece at an edge", captured[1, 0])
