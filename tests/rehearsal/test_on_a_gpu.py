"""A real GPU: kernels and waits of a captured frame beside the rehearsal's, and its sound beside the CPU's."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from services.code2wav.family import load_decoder
from services.common.engine.device import Accelerator, Capturer, CudaGraphs, prepared_device
from services.talker.engine import TalkerEngine
from services.talker.execution import cache_attention, experts, lacks_in_place, step_kernels
from services.talker.graphs import StepGraphs
from services.talker.inputs import Prompt, Text
from services.talker.model import load_talker
from services.talker.moe import grouped_experts, static_experts
from services.talker.runner import Advance, StepInput, TalkerRunner
from services.talker.sampling import resolve
from services.talker.speech import SpeechRequest
from services.talker.varlen import refusal
from tests.rehearsal.support.goldens import FILE
from tests.rehearsal.support.models import talker, talker_spec
from tests.support.stage.replay import ReplayedOps
from tests.support.stage.talker import codes_of

# A library may have several kernels for an operator (split products, top-k), or one for two.
LEAST, MOST = 0.8, 2.0


@pytest.mark.gpu
@pytest.mark.parametrize("fused", ["fused, ", ""])
@pytest.mark.parametrize("name", ["qwen3-omni-30b", "qwen2.5-omni-7b", "qwen3-tts-1.7b"])
def test_a_captured_frame(name: str, fused: str, monkeypatch: pytest.MonkeyPatch, record_property) -> None:
    """At published sizes, with weights of any values."""
    device = prepared_device("cuda")
    accelerator = Accelerator.of(device)
    way = experts(accelerator, "bfloat16") if name.startswith("qwen3-omni") else experts(None, "float32")
    model = talker(name, torch.bfloat16, way, device)
    for tensor in (*model.parameters(), model.text_table):
        tensor.data.normal_(std=0.02)
    shapes = StepGraphs._shapes
    monkeypatch.setattr(StepGraphs, "_shapes", lambda self: list(shapes(self))[-1:])
    compile = "auto" if fused else "off"
    attention = cache_attention(lacks_in_place(compile, accelerator, "bfloat16"))
    kernels = step_kernels(compile, accelerator)
    runner = TalkerRunner(model, 1, 256, CudaGraphs(device), kernels=kernels, attention=attention)
    runner.assign(0, resolve(model.spec.defaults, seed=1, top_k=50))
    frame = [StepInput(0, 1, 50, 50, Advance(5, 20, 20))]
    runner.step(frame)
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        runner.step(frame)
        torch.cuda.set_sync_debug_mode("default")
    assert len([each for each in waits if "synchronizing" in str(each.message)]) == 1
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        runner.step(frame)
        torch.cuda.synchronize(device)
    names = [event.name for event in profiled.events() or () if event.device_type == DeviceType.CUDA]
    count = len([each for each in names if not each.startswith(("Memcpy", "Memset"))])
    used = "grouped_experts" if way is grouped_experts and name.startswith("qwen3-omni") else "static_experts"
    step = f"{name} talker, bfloat16, {used}, {fused}1 row of {8192 if fused else 256} positions"
    recorded = json.loads(FILE.read_text())[step]["kernels"]
    record_property(f"{step}: kernels", count)
    record_property(f"{step}: kernels in the rehearsal", recorded)
    assert LEAST <= count / recorded <= MOST


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3-omni-30b", "qwen2.5-omni-7b", "qwen3-tts-1.7b"])
def test_attention_in_place_is_sdpa_s(name: str, dtype: torch.dtype) -> None:
    device = prepared_device("cuda")
    if lacks_in_place("auto", Accelerator.of(device), "bfloat16"):
        pytest.skip("not on this GPU")
    for positions in (301, 8193):
        assert refusal(cache_attention(None), talker_spec(name).talker, positions, dtype, device) is None


async def spoken(checkpoint: Path, device: torch.device, capturer: Capturer | None) -> tuple[np.ndarray, torch.Tensor]:
    """Codes (frames, groups) and samples of a greedy answer, in float32, with captured steps if there is a capturer."""
    _, model = load_talker(str(checkpoint), device, torch.float32)
    if capturer is not None:
        model.use_experts(static_experts)
    kernels = step_kernels("auto", Accelerator.of(device))
    engine = TalkerEngine(TalkerRunner(model, 2, 300, capturer, kernels=kernels))
    prompt = Prompt(torch.arange(30, 60), torch.full((30,), -1), torch.arange(30)[:, None].expand(-1, 3))
    rules = resolve(model.spec.defaults, temperature=0, seed=1, max_frames=40)
    speech = engine.submit(SpeechRequest(prompt, Text(range(30, 70)), rules))
    speech.finish_text()
    codes = await codes_of(speech)
    engine.stop()
    decoder = load_decoder(str(checkpoint), "float32", str(device))
    states = decoder.new_states(1)
    batch = states.batch([states.acquire() or 0])
    (samples,) = decoder.step(torch.from_numpy(codes).long()[None].to(device), batch)
    return codes, samples


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_a_spoken_answer_is_the_cpu_s(tiny_checkpoint: Path, device: str) -> None:
    on = prepared_device(device)
    capturer = CudaGraphs(on) if device == "cuda" else ReplayedOps()
    codes, samples = await spoken(tiny_checkpoint, on, capturer)
    expected_codes, expected = await spoken(tiny_checkpoint, torch.device("cpu"), None)
    assert len(codes) > 1
    np.testing.assert_array_equal(codes, expected_codes)
    torch.testing.assert_close(samples, expected, rtol=0, atol=1e-4)
