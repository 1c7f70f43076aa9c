"""Captures on a device, told by fakes of torch.cuda; and the stand-in for a CPU notices what a graph would."""

import contextlib
from typing import Any, ClassVar

import pytest
import torch

from services.common.engine.device import Accelerator, CudaGraphs, captures, engine_device
from services.talker import execution as talker_execution
from services.talker.attention import SDPA
from services.talker.config import TalkerSettings
from services.talker.graphs import StepGraphs, StepShape
from services.talker.moe import grouped_experts, static_experts
from tests.support.stage.replay import CaptureError, ReplayedOps


class FakeCuda:
    """The part of torch.cuda that captures, with a current device and a current stream as the real one has."""

    def __init__(self, devices: int) -> None:
        self.devices, self.current, self.streams, self.captured_on = devices, 0, [], []
        self.stream_now: object = "default"
        cuda = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.device = torch.device(device).index
                cuda.streams.append(self)

            def wait_stream(self, other: object) -> None: ...

        class Graph:
            def replay(self) -> None: ...

        self.Stream, self.CUDAGraph = Stream, Graph

    def is_available(self) -> bool:
        return self.devices > 0

    def device_count(self) -> int:
        return self.devices

    def graph_pool_handle(self) -> tuple[str, int]:
        return ("pool", self.current)

    def current_stream(self):
        stream = self.Stream.__new__(self.Stream)
        stream.device = self.current
        return stream

    @contextlib.contextmanager
    def device(self, device: torch.device):
        before, self.current = self.current, torch.device(device).index
        yield
        self.current = before

    @contextlib.contextmanager
    def stream(self, stream: object):
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    @contextlib.contextmanager
    def graph(self, graph: object, pool: object, stream: object = None):
        """As torch's: a capture without a stream is one on a stream of the current device."""
        stream = self.Stream(torch.device("cuda", self.current)) if stream is None else stream
        self.captured_on.append((self.current, stream, pool))
        with self.stream(stream):
            yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(devices=2)
    names = ("Stream", "CUDAGraph", "graph_pool_handle", "current_stream", "device", "stream", "graph")
    for name in (*names, "is_available", "device_count"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_captures_are_made_on_the_engines_device_and_all_on_one_stream(cuda: FakeCuda) -> None:
    graphs, seen = CudaGraphs(torch.device("cuda", 1)), []

    def run() -> torch.Tensor:
        seen.append((cuda.current, cuda.stream_now))
        return torch.zeros(1)

    for _ in range(3):
        graphs.capture(run)
    (stream,) = cuda.streams
    assert stream.device == 1
    assert seen == [(1, stream)] * 9  # each function is warmed up twice, and captured
    assert cuda.captured_on == [(1, stream, ("pool", 1))] * 3
    assert cuda.current == 0


def test_a_device_is_named_with_its_number_or_refused(cuda: FakeCuda) -> None:
    assert engine_device("auto") == engine_device("cuda") == torch.device("cuda", 0)
    assert engine_device("cuda:1") == torch.device("cuda", 1)
    assert engine_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"--device cuda:2: there are 2 CUDA devices"):
        engine_device("cuda:2")
    with pytest.raises(ValueError, match="--device gpu: must be auto, cpu, cuda or cuda:N"):
        engine_device("gpu")
    with pytest.raises(ValueError, match="--device meta: no stage has run there; give auto, cpu, cuda or cuda:N"):
        engine_device("meta")
    cuda.devices = 0
    assert engine_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="--device cuda: torch finds no CUDA device here"):
        engine_device("cuda")


class _Shapes:
    """A capturer that keeps what it was given."""

    def __init__(self) -> None:
        self.steps: list = []

    def capture(self, run):
        self.steps.append(run())
        return ReplayedOps().capture(lambda: torch.zeros(1))


@pytest.mark.parametrize(("slots", "positions"), [(8, 8192), (6, 1000), (1, 100)])
def test_talker_steps_are_captured_from_the_largest_and_cover_all(slots: int, positions: int) -> None:
    capturer = _Shapes()
    inputs = torch.ones(6, slots, dtype=torch.long)

    def step(shape: StepShape) -> Any:
        return shape

    graphs = StepGraphs(capturer, step, inputs, (0, 0, 0, positions, 0, 0), positions, codes=3072)
    sizes = [(shape.width, shape.rows, shape.length) for shape in capturer.steps]
    assert sizes == sorted(sizes, reverse=True)
    assert len(graphs._captured) == len(set(sizes)) == len(sizes)
    assert (inputs[3] == positions).all()  # while captures ran, every slot wrote to its spare position
    for rows in range(1, slots + 1):
        for length in (0, 1, positions // 2, positions):
            for width in (0, 50, 64, 65, 3072, 100_000):
                graphs.run(StepShape(rows, length, width, 0))
                graphs.run(StepShape(rows, length, 0, width))
                assert graphs._covering(StepShape(rows, length, width, 0)).length <= max(256, 4 * length)


ARCHITECTURES: dict[str, tuple[int, int]] = {
    "sm_80": (8, 0), "sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0), "sm_103": (10, 3), "sm_120": (12, 0),
}  # fmt: skip


class TestExecution:
    grouped: ClassVar = {"sm_90", "sm_100", "sm_103"}

    @pytest.mark.parametrize("name", ARCHITECTURES)
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_every_gpu_captures_and_only_those_with_the_kernel_run_grouped_products(self, name: str, dtype: str):
        accelerator = Accelerator("GPU", ARCHITECTURES[name], 80 * 1024**3)
        assert accelerator.architecture == name
        assert captures("auto", accelerator)
        has_kernel = name in self.grouped and dtype == "bfloat16"
        assert talker_execution.experts(accelerator, dtype) is (grouped_experts if has_kernel else static_experts)
        settings = TalkerSettings(model="a")
        (moe,) = [each for each in talker_execution.choices(settings, accelerator, dtype) if each.part == "moe"]
        assert name in moe.reason
        assert dtype in moe.reason
        assert not captures("off", accelerator)

    @pytest.mark.parametrize(
        ("accelerator", "compile", "dtype", "said"),
        [
            (Accelerator("H100", (9, 0), 0), "auto", "bfloat16", None),
            (Accelerator("H100", (9, 0), 0), "auto", "float16", None),
            (Accelerator("H100", (9, 0), 0), "off", "bfloat16", "--compile=off"),
            (Accelerator("H100", (9, 0), 0), "auto", "float32", "flash attention has no float32"),
            (Accelerator("T4", (7, 5), 0), "auto", "float16", "flash attention needs sm_80"),
            (Accelerator("MI300X", (9, 4), 0, "gfx942"), "auto", "bfloat16", "ours have run on no GPU of AMD"),
        ],
        ids=lambda value: getattr(value, "name", value),
    )
    def test_attention_is_in_place_where_it_can_be(
        self, accelerator: Accelerator, compile: str, dtype: str, said: str | None, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(talker_execution, "_triton_lacks", lambda: None)
        assert talker_execution.lacks_in_place(compile, accelerator, dtype) == said
        settings = TalkerSettings.model_validate({"model": "a", "compile": compile})
        for refused in (None, "differs here by 2"):
            attention = talker_execution.choices(settings, accelerator, dtype, refused)[-1]
            assert attention.part == "attention"
            is_sdpa = bool(said or refused)
            assert attention.path == ("SDPA: flash, memory-efficient" if is_sdpa else "over the cache in place")
            assert (said or refused or "agrees with SDPA") in attention.reason
        assert talker_execution.cache_attention(said or "a reason") is SDPA

    def test_a_cpu_captures_nothing_and_compiles_when_told_to(self):
        assert not talker_execution.compiles_predictor("auto", None)
        assert not captures("auto", None)
        assert talker_execution.compiles_predictor("on", None)
        assert not captures("on", None)


@torch.inference_mode()
def test_the_stand_in_reads_static_tensors_anew_and_keeps_what_python_computed() -> None:
    x, scale = torch.ones(3), {"of": 2}
    good, stale = ReplayedOps(), ReplayedOps()
    right = good.capture(lambda: (x * 2).cumsum(0))
    wrong = stale.capture(lambda: x * scale["of"])
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    scale["of"] = 5
    right.replay()
    wrong.replay()
    assert right.output.tolist() == [2, 6, 12]
    assert wrong.output.tolist() == [2, 4, 6]  # as a graph would: 5 never reached it


@torch.inference_mode()
def test_the_stand_in_spoils_what_other_captures_allocated() -> None:
    capturer, x = ReplayedOps(), torch.ones(2)
    kept: list[torch.Tensor] = []
    capturer.capture(lambda: kept.append(x + 1) or kept[-1])
    uses_it = capturer.capture(lambda: kept[-1] * 1)
    uses_it.replay()
    assert uses_it.output.isnan().all()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("waits", "message"),
    [
        (lambda x: x * float(x.sum()), "waits for the host"),
        (lambda x: x[x > 0], "waits for the host"),
        (lambda x: x.nonzero(), "waits for the host"),
        (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), "made of Python's values"),
    ],
)
def test_the_stand_in_refuses_what_a_graph_cannot_hold(waits, message) -> None:
    x = torch.ones(3)
    with pytest.raises(CaptureError, match=message):
        ReplayedOps().capture(lambda: waits(x))
