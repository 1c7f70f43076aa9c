"""`quartet up` shares out the GPUs that are there: what it plans fits, and what cannot fit is refused in a sentence."""

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from cli import check, gpu_plan
from cli import gpus as gpu_query
from cli.budget import CONTEXT_BYTES, GIB, MIB, THINKER_STEP_BYTES, Demand, Gpus, Layout, share_out
from cli.budget_report import GPUS
from cli.gpu_plan import ASR_SOUND_TOKENS, ASR_SOUNDS, share_gpus
from cli.main import app
from cli.plan import LaunchError, PlannedStage
from cli.sizes import BudgetError
from services.sizes import PipelineSizes
from services.thinker.device import visible_devices
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
WITH_ADAPTERS = ["--lora-root=/adapters", "--lora-experts=true", "--max-lora-rank=64"]
TOO_SMALL_FOR_ADAPTERS = {*TOO_SMALL, ("30B", SMALL, 8), ("30B", MIDDLE, 4), ("30B", "96 GB (RTX PRO 6000)", 1)}


_read = cache(check.stage_settings)


def stage_settings(kind: str, model: str, flags: Sequence[str]) -> Any:
    """As the product reads them, but the same flags once."""
    return _read(kind, model, tuple(flags))


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is built for CUDA, and the hub has the published models' sizes."""
    monkeypatch.setattr(gpu_plan, "stage_settings", stage_settings)
    monkeypatch.setattr("cli.gpu_plan.vllm_is_for_cpus", lambda: False)
    monkeypatch.setattr("cli.gpu_plan.read_sizes", lambda model: PUBLISHED[model])


def gpus(count: int, gpu_bytes: int, taken_bytes: int = 0) -> Gpus:
    return Gpus((gpu_bytes,) * count, (taken_bytes,) * count)


def stages(model: str, **flags: Sequence[str]) -> list[PlannedStage]:
    kinds = [kind for kind in STAGES if kind in PUBLISHED[model].weights]
    return [PlannedStage(kind, kind, model, flags.get(kind, ())) for kind in kinds]


def taken(started: Sequence[PlannedStage], gpu_bytes: int, count: int = 1) -> Mapping[int, int]:
    """Bytes that stages take of each GPU by their flags: the thinker what it is given, the others what they reserve.

    Raises ValueError: vLLM would refuse the thinker's flags.
    """
    counted: Counter[int] = Counter()
    for stage in started:
        settings = stage_settings(stage.kind, stage.model, stage.flags)
        device = int(settings.device.partition(":")[2] or 0)
        if stage.kind == "thinker":
            ranks = settings.tensor_parallel_size
            visible_devices(settings.device, ranks, for_cpus=False, cuda_devices=count, visible=None)
            given = int(settings.gpu_memory_utilization * gpu_bytes) + CONTEXT_BYTES
            counted.update({device + rank: given for rank in range(ranks)})
        else:
            positions = getattr(settings, "max_context_positions", 0)
            load = Demand(settings.max_running_requests, talker_positions=positions)
            alone = Layout((), {stage.kind: (0,)})
            (share,) = share_out(PUBLISHED[stage.model].of([stage.kind]), Gpus.alike(1 << 60), load, alone).shares
            counted[device] += share.total
    return counted


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", PUBLISHED)
def test_what_is_planned_fits_on_the_gpus(model: str, gpu: str, count: int) -> None:
    gpu_bytes = GPUS[gpu] * MIB
    if (model, gpu, count) in TOO_SMALL:
        with pytest.raises(LaunchError, match=r"GiB too few: .*; (this fits: --|it fits on )"):
            share_gpus(stages(model), gpus(count, gpu_bytes))
        return
    launch = share_gpus(stages(model), gpus(count, gpu_bytes))
    used = taken(launch.stages, gpu_bytes, count)
    assert set(used) <= set(range(count))
    assert max(used.values()) <= gpu_bytes


@pytest.mark.parametrize(
    ("model", "gpu"),
    [("30B", LARGE), ("30B", "96 GB (RTX PRO 6000)"), ("7B", MIDDLE), ("3B", SMALL)],
)
def test_the_stages_own_defaults_would_not(model: str, gpu: str) -> None:
    """What was started before: the documented command asked for 61 GiB of 45."""
    assert taken(stages(model), GPUS[gpu] * MIB)[0] > GPUS[gpu] * MIB


def adapters(model: str, ranks: int) -> int:
    """Bytes of four adapters of rank 64 on each GPU: inputs and outputs of the layers, bfloat16."""
    if model == "30B":
        attention = 3 * 2048 + 5120 // ranks + 4096 // ranks + 2048
        return 4 * 64 * 2 * 48 * (attention + 2048 + 128 + 128 * (2048 + 2304 // ranks + 2048))
    width, inner, queries, keys = {"7B": (3584, 18_944, 3584, 512), "3B": (2048, 11_008, 2048, 256)}[model]
    attention = 3 * width + (queries + 2 * keys) // ranks + queries // ranks + width
    dense = 2 * width + 3 * inner // ranks + width
    return 4 * 64 * 2 * (28 if model == "7B" else 36) * (attention + dense)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", ["30B", "7B", "3B"])
def test_adapters_fit_beside_all_else(model: str, gpu: str, count: int) -> None:
    """What the thinker takes besides, by the sum of its parts, is left free for it and for the other stages."""
    gpu_bytes, sizes = GPUS[gpu] * MIB, PUBLISHED[model]
    if (model, gpu, count) in TOO_SMALL_FOR_ADAPTERS:
        with pytest.raises(LaunchError, match=r"GiB for adapters; (this fits: --thinker-arg=--max-l|it fits on )"):
            share_gpus(stages(model, thinker=WITH_ADAPTERS), gpus(count, gpu_bytes))
        return
    launch = share_gpus(stages(model, thinker=WITH_ADAPTERS), gpus(count, gpu_bytes))
    thinker = stage_settings("thinker", model, launch.stages[0].flags)
    ranks = thinker.tensor_parallel_size
    tokens = thinker.kv_cache_bytes // (sizes.kv_per_token // min(ranks, sizes.kv_heads))
    parts = (
        (sizes.weights["thinker"] - sizes.unsplit) // ranks + sizes.unsplit,
        THINKER_STEP_BYTES,
        thinker.kv_cache_bytes + tokens * sizes.states_per_token,
        adapters(model, ranks),
    )
    assert sum(parts) <= thinker.gpu_memory_utilization * gpu_bytes + gpu_bytes // 1000, "which is rounded down"
    assert max(taken(launch.stages, gpu_bytes, count).values()) <= gpu_bytes
    assert f"beside {adapters(model, ranks) / GIB:.1f} GiB for adapters" in launch.lines[1]


def test_adapters_that_do_not_fit_are_refused_with_the_change_that_does() -> None:
    flags = ["--lora-root=/a", "--lora-experts=true"]
    assert share_gpus(stages("30B", thinker=flags), gpus(1, 95 * GIB)).lines
    with pytest.raises(LaunchError, match=r"beside 19.2 GiB for adapters; this fits: --thinker-arg=--max-loras=1$"):
        share_gpus(stages("30B", thinker=[*flags, "--max-lora-rank=64"]), gpus(1, 95 * GIB))
    missing = share_gpus(stages("30B", thinker=["--lora=sea=/nowhere"]), gpus(1, 95 * GIB))
    assert missing.lines[0].startswith("GPU memory is not shared out: thinker: lora sea: /nowhere/adapter_model.safete")


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
    assert flags["code2wav"][0] == "--device=cuda:1"
    assert max(taken(launch.stages, 95 * GIB).values()) <= 95 * GIB


def test_memory_of_the_thinker_that_the_user_has_set() -> None:
    """It is kept, as whoever sets it may know better than an estimate; a note says what is against it."""
    too_much = share_gpus(stages("30B", thinker=["--gpu-memory-utilization=0.95"]), gpus(1, 95 * GIB))
    assert "--gpu-memory-utilization=0.95 is more than the others leave: give --thinker-arg=--kv" in too_much.lines[-1]
    assert list(too_much.stages[0].flags) == ["--gpu-memory-utilization=0.95"], "vLLM finds out what that leaves"
    small = share_gpus(stages("30B", thinker=["--kv-cache-bytes=2147483648"]), gpus(1, 95 * GIB)).stages[0].flags
    assert not any("max-context" in flag for flag in small), "the context is what that cache holds"
    (utilization,) = (float(flag.partition("=")[2]) for flag in small if "utilization" in flag)
    assert 0.6 < utilization < 0.8
    kept = share_gpus(stages("30B", thinker=["--kv-cache-bytes=2147483648"]), gpus(1, 24 * GIB))
    assert kept.lines[0].startswith("note: by an estimate on the safe side 24.0 GiB are ")
    assert "--max-running-requests=8" in kept.stages[1].flags, "the others take no more for it"
    beside = stages("30B", thinker=["--kv-cache-bytes=2147483648"], talker=["--device=cuda:1"])
    assert share_gpus(beside, gpus(2, 24 * GIB)).lines[0].startswith("note: ")
    little = share_gpus(stages("30B", thinker=["--gpu-memory-utilization=0.3"]), gpus(1, 95 * GIB))
    assert "=0.3 is less than the weights take: give" in little.lines[-1]
    long = ["--kv-cache-bytes=2147483648", "--max-context-tokens=32768"]
    assert (
        "which --max-context-tokens=32768 exceeds"
        in share_gpus(stages("30B", thinker=long), gpus(1, 95 * GIB)).lines[-1]
    )
    few = stages("30B", thinker=["--kv-cache-bytes=4294967296", "--gpu-memory-utilization=0.7"])
    kept = share_gpus(few, gpus(1, 95 * GIB)).stages[0].flags
    assert list(kept[:2]) == few[0].flags
    assert not any("kv-cache" in flag or "utilization" in flag for flag in kept[2:])


def test_a_refusal_says_the_smallest_change_that_fits() -> None:
    less = "--thinker-arg=--max-context-tokens=8192 --talker-arg=--max-running-requests=4"
    with pytest.raises(LaunchError, match=f"GiB too few: thinker .*; this fits: {less}"):
        share_gpus(stages("30B"), gpus(1, GPUS[LARGE] * MIB))
    with pytest.raises(LaunchError, match=r"it fits on a GPU of 96 GB \(RTX PRO 6000\)"):
        share_gpus(stages("30B"), gpus(1, GPUS[SMALL] * MIB))


def test_memory_of_other_programs_is_left_to_them() -> None:
    quiet, busy = (share_gpus(stages("7B"), gpus(1, 80 * GIB, taken_bytes=gib * GIB)).stages for gib in (0, 10))
    (alone,), (beside,) = ([flag for flag in each[0].flags if "kv-cache" in flag] for each in (quiet, busy))
    freed = int(alone.partition("=")[2]) - int(beside.partition("=")[2])
    assert 8 * GIB < freed <= 10 * GIB  # the rest is the states'
    one_full = Gpus((80 * GIB, 80 * GIB), (70 * GIB, 0))
    assert "--device=cuda:1" in share_gpus(stages("7B"), one_full).stages[0].flags
    busy = r"80.0 GiB, of which other programs have 70.0, are .* GiB too few.*; end what else runs on the GPUs"
    with pytest.raises(LaunchError, match=busy):
        share_gpus(stages("7B"), gpus(1, 80 * GIB, taken_bytes=70 * GIB))


def test_stages_on_the_cpu_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.gpu_plan.vllm_is_for_cpus", lambda: True)
    launch = share_gpus(stages("30B", code2wav=["--device=cpu"]), gpus(1, 24 * GIB))
    assert [bool(stage.flags) for stage in launch.stages] == [False, True, True]
    assert list(launch.stages[2].flags) == ["--device=cpu"]
    assert share_gpus(stages("30B"), Gpus((), ())).stages == stages("30B")


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
    monkeypatch.setattr("cli.gpu_plan.gpus", lambda: gpus(1, 2 * GIB))
    refused = CliRunner().invoke(app, command[:-1])
    assert refused.exit_code == 1
    assert "GiB too few" in refused.output


def test_devices_that_are_set() -> None:
    moved = share_gpus(stages("30B", thinker=["--device=cuda:1"]), gpus(2, 95 * GIB)).stages
    devices = [stage_settings(stage.kind, "x", stage.flags).device for stage in moved]
    assert [device.replace("auto", "cuda:0") for device in devices] == ["cuda:1", "cuda:0", "cuda:0"]
    with pytest.raises(LaunchError, match="thinker: --device=cuda:2: there are 2 GPUs; give auto, cpu, cuda or cuda:N"):
        share_gpus(stages("30B", thinker=["--device=cuda:2"]), gpus(2, 95 * GIB))
    with pytest.raises(LaunchError, match="talker: --device=cuda:x: there are 2 GPUs"):
        share_gpus(stages("30B", talker=["--device=cuda:x"]), gpus(2, 95 * GIB))
    auto = share_gpus(stages("30B", talker=["--device=auto"]), gpus(2, 95 * GIB)).stages[1]
    assert stage_settings("talker", "x", auto.flags).device == "cuda:1", "the plan's flag is the last"
    full = Gpus((80 * GIB, 80 * GIB), (70 * GIB, 0))
    cuda = share_gpus(stages("7B", thinker=["--device=cuda"]), full).stages[0]
    assert stage_settings("thinker", "x", cuda.flags).device == "cuda:1", "cuda is any of them"
    set_memory = stages("30B", thinker=["--gpu-memory-utilization=0.7"], talker=["--device=cuda:5"])
    with pytest.raises(LaunchError, match="talker: --device=cuda:5: there are 2 GPUs"):
        share_gpus(set_memory, gpus(2, 95 * GIB))
    crowded = {"talker": ["--device=cuda:0"], "code2wav": ["--device=cuda:0"], "thinker": ["--device=cuda:0"]}
    with pytest.raises(LaunchError, match="it fits without --device"):
        share_gpus(stages("30B", **crowded), gpus(2, 80 * GIB))


def test_code2wav_may_have_streams_of_its_own() -> None:
    few, many = (
        share_gpus(stages("30B", code2wav=[f"--max-running-requests={count}"]), gpus(1, 140 * GIB)) for count in (8, 64)
    )
    assert int(few.lines[1].split()[-2]) > int(many.lines[1].split()[-2]) + 30_000, (
        "tokens that are left to the thinker"
    )


def painter(tmp_path: Path, *flags: str) -> list[PlannedStage]:
    """A diffusers checkpoint with 2 MiB of weights, half of them a text encoder's."""
    for part in ("transformer", "text_encoder"):
        (tmp_path / part).mkdir(exist_ok=True)
        save_file({"weight": torch.zeros(512, 512)}, tmp_path / part / "model.safetensors")
    return [PlannedStage("dit", "dit", str(tmp_path), flags)]


def test_a_dit_has_a_share(tmp_path: Path) -> None:
    assert not list(share_gpus(painter(tmp_path), gpus(1, 24 * GIB)).stages[0].flags)
    beside = share_gpus([*stages("30B"), *painter(tmp_path)], gpus(4, 95 * GIB)).stages
    assert list(beside[-1].flags) == ["--device=cuda:3"]
    ranks = share_gpus([*stages("30B"), *painter(tmp_path, "--context-parallel=ulysses=2")], gpus(4, 95 * GIB))
    assert not any("device" in flag for flag in ranks.stages[-1].flags), "which a group of ranks refuses"
    with pytest.raises(LaunchError, match="context_parallel needs 2 GPUs, of which there are 1"):
        share_gpus(painter(tmp_path, "--context-parallel=ulysses=2"), gpus(1, 24 * GIB))
    with pytest.raises(LaunchError, match=r"GPU 0: .* GiB too few: dit .*it fits on 2 GPUs"):
        share_gpus(painter(tmp_path, "--context-parallel=ulysses=2"), gpus(2, GIB))
    with pytest.raises(LaunchError, match="--device=cuda:1 is one GPU, and context_parallel needs several"):
        share_gpus(painter(tmp_path, "--context-parallel=ulysses=2", "--device=cuda:1"), gpus(2, 24 * GIB))
    with pytest.raises(LaunchError, match="GiB too few: dit "):
        share_gpus(painter(tmp_path), gpus(1, GIB))
    shared = [*stages("30B"), PlannedStage("encoder", "encoder", str(tmp_path), ())]
    assert any(line.startswith("encoder") for line in share_gpus(shared, gpus(1, 140 * GIB)).lines)


@pytest.mark.parametrize("count", [1, 2])
def test_ears_beside_a_thinker_have_a_share(count: int) -> None:
    """Each is a thinker by itself; by default vLLM would take nearly all memory for one of them."""
    gpu_bytes = GPUS["96 GB (RTX PRO 6000)"] * MIB
    asr = PlannedStage("asr", "thinker", "3B", ["--max-context-tokens=1024"], is_asr=True)
    launch = share_gpus([stages("7B")[0], asr], gpus(count, gpu_bytes))
    flags = dict(flag.split("=") for flag in launch.stages[1].flags)
    assert flags["--max-context-tokens"] == "1024"
    assert int(flags["--kv-cache-bytes"]) == ASR_SOUNDS * ASR_SOUND_TOKENS[0] * PUBLISHED["3B"].kv_per_token
    assert flags.get("--device") == (None if count == 1 else "cuda:1")
    assert max(taken(launch.stages, gpu_bytes, count).values()) <= gpu_bytes
    assert [line.split()[0] for line in launch.lines[1:3]] == ["thinker", "asr"]


@pytest.mark.parametrize("count", [1, 4])
def test_an_aligner_has_a_share(count: int) -> None:
    aligner = PlannedStage("aligner", "aligner", "quartet-demo-aligner", ["--max-batch-audio-s=60"])
    launch = share_gpus([*stages("30B"), aligner], gpus(count, 140 * GIB))
    (line,) = [line for line in launch.lines if line.startswith("aligner")]
    assert "a step of 60 s" in line
    assert list(launch.stages[-1].flags) == ["--max-batch-audio-s=60", *(["--device=cuda:3"] if count == 4 else [])]
    apart = share_gpus([*stages("30B"), replace(aligner, flags=["--device=cpu"])], gpus(count, 140 * GIB))
    assert not any(line.startswith("aligner") for line in apart.lines)


def test_a_large_dit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = PipelineSizes({"transformer": 40 * GIB, "text_encoder": 13 * GIB}, {"text_encoder"}, {"transformer"})
    monkeypatch.setattr("cli.gpu_plan.read_pipeline", lambda model, dtype: sizes)
    dit = PlannedStage("dit", "dit", "large", ())
    with pytest.raises(LaunchError, match="this fits: --dit-arg=--offload=model"):
        share_gpus([dit], gpus(1, 48 * GIB))
    small = replace(dit, flags=["--quantization=bitsandbytes-4bit", "--offload=model"])
    assert share_gpus([small], gpus(1, 24 * GIB)).lines
    apart = share_gpus([*stages("30B"), dit], gpus(3, int(79.6 * GIB)))
    assert max(taken(apart.stages[:3], int(79.6 * GIB), 3).values()) < 79.6 * GIB
    crowd = share_gpus(
        [*stages("30B"), replace(dit, flags=["--offload=group"]), replace(dit, kind="encoder")], gpus(2, 95 * GIB)
    )
    assert crowd.lines


def test_what_is_not_known_is_not_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = [PlannedStage("dit", "dit", "nobody/nothing", ())]  # and the hub is not to be asked, in tests
    launch = share_gpus([*stages("30B"), *unknown], gpus(1, 140 * GIB))
    assert launch.lines[0].startswith("GPU memory is not shared out: nobody/nothing: ")
    assert not any(stage.flags for stage in launch.stages)

    def refuse(model: str) -> None:
        raise BudgetError("nobody knows")

    monkeypatch.setattr("cli.gpu_plan.read_sizes", refuse)
    assert share_gpus(stages("30B"), gpus(1, 24 * GIB)).lines == ("GPU memory is not shared out: nobody knows",)


def test_unequal_gpus_of_one_thinker() -> None:
    """vLLM stops where its share of a GPU is not free there."""
    uneven = Gpus((24 * GIB, 80 * GIB, 24 * GIB), (0, 58 * GIB, 0))
    launch = share_gpus(stages("7B", thinker=["--tensor-parallel-size=2"]), uneven)
    settings = stage_settings("thinker", "x", launch.stages[0].flags)
    for gpu in range(settings.tensor_parallel_size):
        given = settings.gpu_memory_utilization * uneven.memory[gpu]
        assert given + CONTEXT_BYTES <= uneven.memory[gpu] - uneven.taken[gpu]


def test_a_remedy_is_for_stages_that_there_are() -> None:
    with pytest.raises(LaunchError, match="it fits without --tensor-parallel-size"):
        share_gpus(stages("30B", thinker=["--tensor-parallel-size=1"]), gpus(4, 45 * GIB))
    decoder = stages("30B", talker=["--device=cpu"], code2wav=["--max-running-requests=32"])[1:]
    with pytest.raises(LaunchError, match=r"this fits: --code2wav-arg=--max-running-requests=8$"):
        share_gpus(decoder, gpus(1, 4 * GIB))
    spoken = [stage for stage in stages("30B") if stage.kind != "thinker"]
    with pytest.raises(LaunchError, match=r"this fits: --talker-arg=--max-running-requests=\d --talker-arg=[^ ]*$"):
        share_gpus(spoken, gpus(1, 11 * GIB))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('a library says hello'); print('[[100, 90]]')", None),
        ("import sys; sys.exit('CUDA driver initialization failed')", "CUDA driver initialization failed"),
        ("print('nothing')", "torch cannot say what they are"),
    ],
)
def test_devices_are_asked_for_in_another_process(
    program: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\n{program}\n")
    fake.chmod(0o755)
    module: Any = gpu_query
    monkeypatch.setattr(module, "has_gpu", lambda: True)
    monkeypatch.setattr(module.sys, "executable", str(fake))
    if said is None:
        assert module.gpus() == Gpus((100,), (0,)), "what the driver itself has is nobody's"
    else:
        with pytest.raises(RuntimeError, match=said):
            module.gpus()


@pytest.mark.gpu
def test_this_machines_gpus() -> None:
    found = gpu_query.gpus()
    memory = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())]
    assert list(found.memory) == memory
    assert all(0 < found.usable(gpu) < memory[gpu] for gpu in range(len(memory)))


def test_the_command_line_imports_no_torch() -> None:
    program = "import sys, cli.supervisor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
