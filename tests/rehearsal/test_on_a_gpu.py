"""The rehearsal's figures beside a real GPU's: kernels of a captured frame by CUPTI, waits by torch's debug mode."""

import json
import warnings

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from services.common.engine.device import Accelerator, CudaGraphs, prepared_device
from services.talker.execution import experts, step_kernels
from services.talker.graphs import StepGraphs
from services.talker.runner import Advance, StepInput, TalkerRunner
from services.talker.sampling import resolve
from tests.rehearsal.support.goldens import FILE
from tests.rehearsal.support.models import talker

pytestmark = pytest.mark.gpu
# A library may have several kernels for an operator (split products, top-k), or one for two.
LEAST, MOST = 0.8, 2.0


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
    kernels = step_kernels("auto" if fused else "off", accelerator)
    runner = TalkerRunner(model, 1, 256, CudaGraphs(device), kernels=kernels)
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
    kernels = len([each for each in names if not each.startswith(("Memcpy", "Memset"))])
    used = (
        "grouped_experts" if way.__name__ == "grouped_experts" and name.startswith("qwen3-omni") else "static_experts"
    )
    recorded = json.loads(FILE.read_text())[f"{name} talker, bfloat16, {used}, {fused}1 row of 256 positions"][
        "kernels"
    ]
    record_property(f"{name}: {fused}kernels of a frame", kernels)
    record_property(f"{name}: {fused}kernels in the rehearsal", recorded)
    assert LEAST <= kernels / recorded <= MOST
