"""`quartet up` shares out the GPUs that are there: what it plans fits, and what cannot fit is refused in a sentence."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import gpus as gpu_query
from cli.budget import CONTEXT_BYTES, GIB, MIB, Demand, Layout, share_out
from cli.budget_report import GPUS
from cli.check import stage_settings
from cli.gpu_plan import share_gpus
from cli.gpus import Gpu
from cli.main import app
from cli.plan import LaunchError, PlannedStage
from services.sizes import Sizes
from tests.support.weights.published_sizes import PUBLISHED

STAGES = ("thinker", "talker", "code2wav")
SMALL, MIDDLE, LARGE = "24 GB (RTX 4090)", "48 GB (L40S)", "80 GB (H100)"
TOO_SMALL = {
    *(("30B", SMALL, count) for count in (1, 2, 4)),
    *(("30B", MIDDLE, count) for count in (1, 2)),
    ("30B", LARGE, 1),
    *(("7B", SMALL, count) for count in (1, 2)),
    ("3B", SMALL, 1),
}


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is built for CUDA, and the hub has the published models' sizes."""
    monkeypatch.setattr("cli.gpu_plan.vllm_is_for_cpus", lambda: False)
    monkeypatch.setattr("cli.gpu_plan.read_sizes", lambda model: PUBLISHED[model])


def gpus(count: int, gpu_bytes: int, taken_bytes: int = 0) -> list[Gpu]:
    return [Gpu("NVIDIA", gpu_bytes, gpu_bytes - taken_bytes)] * count


def stages(model: str, **flags: Sequence[str]) -> list[PlannedStage]:
    kinds = [kind for kind in STAGES if kind in PUBLISHED[model].weights]
    return [PlannedStage(kind, kind, model, flags.get(kind, ())) for kind in kinds]


def taken(started: Sequence[PlannedStage], gpu_bytes: int) -> Mapping[int, int]:
    """Bytes that stages take of each GPU by their flags: the thinker what it is given, the others what they reserve."""
    counted: Counter[int] = Counter()
    for stage in started:
        settings = stage_settings(stage.kind, stage.model, stage.flags)
        sizes: Sizes = PUBLISHED[stage.model].of([stage.kind])
        device = int(settings.device.partition(":")[2] or 0)
        if stage.kind == "thinker":
            given = int(settings.gpu_memory_utilization * gpu_bytes) + CONTEXT_BYTES
            counted.update({device + rank: given for rank in range(settings.tensor_parallel_size)})
        else:
            positions = getattr(settings, "max_context_positions", 0)
            load = Demand(settings.max_running_requests, talker_positions=positions)
            (share,) = share_out(sizes, 1 << 60, load, Layout.of(0, 1, [stage.kind])).shares
            counted[device] += share.total
    return counted


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", PUBLISHED)
def test_what_is_planned_fits_on_the_gpus(model: str, gpu: str, count: int) -> None:
    gpu_bytes = GPUS[gpu] * MIB
    if (model, gpu, count) in TOO_SMALL:
        with pytest.raises(LaunchError, match=r"GiB too few: .*(this fits: --|it fits on )"):
            share_gpus(stages(model), gpus(count, gpu_bytes))
        return
    launch = share_gpus(stages(model), gpus(count, gpu_bytes))
    used = taken(launch.stages, gpu_bytes)
    assert set(used) <= set(range(count))
    assert max(used.values()) <= gpu_bytes


@pytest.mark.parametrize(
    ("model", "gpu"),
    [("30B", LARGE), ("30B", "96 GB (RTX PRO 6000)"), ("7B", MIDDLE), ("3B", SMALL)],
)
def test_the_stages_own_defaults_would_not(model: str, gpu: str) -> None:
    """What was started before: the documented command asked for 61 GiB of 45."""
    assert taken(stages(model), GPUS[gpu] * MIB)[0] > GPUS[gpu] * MIB


def test_each_stage_is_on_its_own_where_there_are_several() -> None:
    launch = share_gpus(stages("30B"), gpus(4, 95 * GIB))
    flags = {stage.kind: stage.flags for stage in launch.stages}
    assert not any("tensor-parallel" in flag for flag in flags["thinker"])
    assert "--device=cuda:1" in flags["talker"]
    assert "--device=cuda:2" in flags["code2wav"]
    assert launch.lines[-1].startswith("not used: GPU 3;")
    split = share_gpus(stages("30B"), gpus(4, GPUS[MIDDLE] * MIB))
    assert "--tensor-parallel-size=2" in split.stages[0].flags
    assert "--device=cuda:2" in split.stages[1].flags


def test_what_the_user_has_set_stays() -> None:
    own = {
        "thinker": ["--max-context-tokens=16384"],
        "talker": ["--max-running-requests=4", "--device=cuda:1"],
        "code2wav": ["--device=cuda:1"],
    }
    launch = share_gpus(stages("30B", **own), gpus(3, 95 * GIB))
    flags = {stage.kind: list(stage.flags) for stage in launch.stages}
    assert flags["thinker"].count("--max-context-tokens=16384") == 1
    assert [flag for flag in flags["talker"] if "device" in flag or "requests" in flag] == own["talker"]
    assert "--max-running-requests=4" in flags["code2wav"], "code2wav serves the talker's streams"
    assert flags["code2wav"][-1] == "--device=cuda:1"
    assert max(taken(launch.stages, 95 * GIB).values()) <= 95 * GIB


def test_memory_that_the_user_has_given_away_is_refused() -> None:
    too_much = stages("30B", thinker=["--gpu-memory-utilization=0.95"])
    with pytest.raises(LaunchError, match=r"=0.95 is more than the others leave: give --kv-cache-bytes=\d+ --"):
        share_gpus(too_much, gpus(1, 95 * GIB))
    few = stages("30B", thinker=["--kv-cache-bytes=4294967296", "--gpu-memory-utilization=0.7"])
    kept = share_gpus(few, gpus(1, 95 * GIB)).stages[0].flags
    assert list(kept[-2:]) == few[0].flags
    assert not any("kv-cache" in flag or "utilization" in flag for flag in kept[:-2])


def test_a_refusal_says_the_smallest_change_that_fits() -> None:
    less = "--thinker-arg=--max-context-tokens=8192 --talker-arg=--max-running-requests=4"
    with pytest.raises(LaunchError, match=f"GiB too few: thinker .*: this fits: {less}"):
        share_gpus(stages("30B"), gpus(1, GPUS[LARGE] * MIB))
    with pytest.raises(LaunchError, match=r"it fits on a GPU of 96 GB \(RTX PRO 6000\)"):
        share_gpus(stages("30B"), gpus(1, GPUS[SMALL] * MIB))


def test_memory_of_other_programs_is_left_to_them() -> None:
    quiet, busy = (share_gpus(stages("7B"), gpus(1, 80 * GIB, taken_bytes=gib * GIB)).stages for gib in (0, 11))
    (alone,), (beside,) = ([flag for flag in each[0].flags if "kv-cache" in flag] for each in (quiet, busy))
    freed = int(alone.partition("=")[2]) - int(beside.partition("=")[2])
    assert 8 * GIB < freed <= 10 * GIB  # the rest is the states'


def test_stages_on_the_cpu_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.gpu_plan.vllm_is_for_cpus", lambda: True)
    launch = share_gpus(stages("30B", code2wav=["--device=cpu"]), gpus(1, 24 * GIB))
    assert [bool(stage.flags) for stage in launch.stages] == [False, True, True]
    assert launch.stages[2].flags == ["--device=cpu"]
    assert share_gpus(stages("30B"), []).stages == stages("30B")


def test_speech_alone_is_planned_too() -> None:
    launch = share_gpus(stages("TTS 1.7B"), gpus(1, GPUS[SMALL] * MIB))
    assert "--max-running-requests=8" in launch.stages[0].flags
    spoken = [stage for stage in stages("30B") if stage.kind != "thinker"]
    assert share_gpus(spoken, gpus(1, 24 * GIB)).stages[0].flags


def test_a_plan_is_shown_and_nothing_starts(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cli.sizes import read_sizes

    monkeypatch.setattr("cli.gpu_plan.read_sizes", read_sizes)
    monkeypatch.setattr("cli.gpu_plan.gpus", lambda: gpus(1, 16 * GIB))
    command = ["up", "--model", str(tiny_checkpoint), "--port", "0", "--plan"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "KV cache of 8 answers of 8192 positions" in shown.output
    assert "services.thinker --model" in shown.output
    assert "--max-context-tokens=" in shown.output
    monkeypatch.setattr("cli.gpu_plan.gpus", lambda: gpus(1, 4 * GIB))
    refused = CliRunner().invoke(app, command[:-1])
    assert refused.exit_code == 1
    assert "GiB too few" in refused.output


def test_devices_are_asked_for_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    here: Any = gpu_query
    monkeypatch.setattr(here, "has_gpu", lambda: True)
    found = here.gpus()
    assert all(gpu.free_bytes <= gpu.memory_bytes for gpu in found)
    monkeypatch.setattr(here.sys, "executable", "/bin/false")
    assert here.gpus() == ()
