"""Which device and which paths vLLM is given, for machines and packages that are not here."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.common.engine.device import Accelerator, Choice
from services.common.stream.rows import hidden_states
from services.thinker import device, environment, execution
from services.thinker.config import ThinkerSettings
from services.thinker.device import visible_devices
from services.thinker.plugin.rows import MROPE_POSITIONS, RowKind, RowStore, row_bytes


def gpu(*capability: int) -> Accelerator:
    return Accelerator("a GPU", (capability[0], capability[1]), 80 * 1024**3)


def settings(**fields: object) -> ThinkerSettings:
    return ThinkerSettings.model_validate({"model": "org/name"} | fields)


def choices(accelerator: Accelerator | None, dtype: str = "bfloat16", **fields: object) -> dict[str, Choice]:
    return {choice.part: choice for choice in execution.choices(settings(**fields), accelerator, dtype)}


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(autouse=True)
def no_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in an image without CUDA's compiler."""
    for name in ("CUDA_HOME", "CUDA_PATH", device.SAMPLER_VARIABLE, "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(device, "DEFAULT_CUDA_HOME", tmp_path / "cuda")


def test_flashinfers_sampler_is_off_where_it_would_compile_its_kernels(tmp_path, monkeypatch):
    program(tmp_path / "cuda/bin/nvcc")
    assert "ninja" in (device.flashinfer_compiler_missing() or "")
    program(tmp_path / "bin/ninja")
    assert device.flashinfer_compiler_missing() is None
    assert environment.defaults(settings())[device.SAMPLER_VARIABLE] == "0", "it would take minutes"
    assert execution.sampler(gpu(9, 0)).path == "native"
    monkeypatch.setenv(device.SAMPLER_VARIABLE, "1")
    asked = execution.sampler(gpu(9, 0))
    assert (asked.path, asked.fatal) == ("FlashInfer", False)
    assert "for minutes" in asked.reason
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "other"))  # FlashInfer looks nowhere else then
    assert "nvcc" in (device.flashinfer_compiler_missing() or "")


def test_flashinfers_compiled_kernels_need_no_compiler(tmp_path, monkeypatch):
    (tmp_path / "flashinfer_jit_cache.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert device.has_flashinfer_kernels()
    assert device.SAMPLER_VARIABLE not in environment.defaults(settings())


def test_what_the_operator_set_stays(tmp_path):
    """In a process of its own: `configure` changes this one's environment for good."""
    code = (
        "import json, os; from services.thinker import environment;"
        "from services.thinker.config import ThinkerSettings;"
        "environment.configure(ThinkerSettings(model='org/name')); print(json.dumps(dict(os.environ)))"
    )
    environ = os.environ | {device.SAMPLER_VARIABLE: "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert (seen[device.SAMPLER_VARIABLE], seen["VLLM_LOGGING_LEVEL"]) == ("1", "ERROR")
    assert seen["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.parametrize(
    ("asked", "visible", "expected"),
    [
        ("auto", None, None),
        ("cuda", "2,3", None),
        ("cuda:0", None, "0"),
        ("cuda:1", None, "1"),
        ("cuda:1", "2,3", "3"),
        ("cuda:1", "GPU-a, GPU-b", "GPU-b"),
    ],
)
def test_a_gpu_is_chosen_among_the_visible_ones(asked, visible, expected):
    assert visible_devices(asked, 1, for_cpus=False, cuda_devices=2, visible=visible) == expected


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_a_build_for_cpus_stays_there_on_a_machine_with_gpus(asked):
    assert visible_devices(asked, 2, for_cpus=True, cuda_devices=8, visible="0") is None


@pytest.mark.parametrize(
    ("asked", "ranks", "for_cpus", "devices", "message"),
    [
        ("cpu", 1, False, 1, r"device: cpu.*built for CUDA.*thinker-cpu"),
        ("cuda", 1, True, 1, r"device: cuda.*built for CPUs.*thinker-cuda"),
        ("cuda:0", 1, True, 1, r"device: cuda:0.*built for CPUs"),
        ("auto", 1, False, 0, "needs 1 CUDA devices, of which 0"),
        ("cuda:2", 1, False, 2, "needs 3 CUDA devices, of which 2"),
        ("cuda", 4, False, 2, "needs 4 CUDA devices, of which 2"),
        ("cuda:1", 2, False, 8, "tensor_parallel_size is 2.*CUDA_VISIBLE_DEVICES"),
        ("mps", 1, False, 1, "not one of auto, cpu, cuda, cuda:N"),
        ("cuda:x", 1, False, 1, "not one of"),
        ("cpu:0", 1, True, 1, "not one of"),
    ],
)
def test_a_device_that_vllm_cannot_have_is_refused(asked, ranks, for_cpus, devices, message):
    with pytest.raises(ValueError, match=message):
        visible_devices(asked, ranks, for_cpus=for_cpus, cuda_devices=devices, visible=None)


def test_a_refused_device_ends_the_process_in_one_line(tmp_path):
    command = [sys.executable, "-m", "services.thinker", "--model", str(tmp_path), "--device", "cuda:1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("invalid settings\ndevice: cuda:1")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("capability", "backend"),
    [((8, 0), "FLASH_ATTN"), ((9, 0), "FLASH_ATTN"), ((10, 0), "FLASH_ATTN"), ((12, 0), "FLASH_ATTN")],
)
def test_paths_on_gpus_without_a_cuda_compiler(capability, backend):
    told = choices(gpu(*capability))
    assert {part: choice.path for part, choice in told.items() if part != "states"} == {
        "step": "compiled, CUDA graphs",
        "split": "one GPU",
        "runner": "V2",
        "attention": backend,
        "sampler": "native",
    }
    assert not any(choice.fatal for choice in told.values())
    assert execution.forced_attention(gpu(*capability), "bfloat16") == (backend if capability[0] == 10 else None)


def test_with_flashinfers_kernels_vllm_chooses_as_it_likes(tmp_path, monkeypatch):
    (tmp_path / "flashinfer_jit_cache.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    told = choices(gpu(10, 0))
    assert (told["attention"].path, told["sampler"].path) == ("FLASHINFER", "FlashInfer")
    assert execution.forced_attention(gpu(10, 0), "bfloat16") is None


def test_paths_on_a_cpu():
    told = choices(None, "float32")
    assert (told["step"].path, told["runner"].path, told["sampler"].path) == ("eager", "V1", "native")
    assert choices(None, "float32", compile="on")["step"].path == "compiled"


def test_what_cannot_start_is_fatal_and_says_what_to_change(monkeypatch):
    assert choices(gpu(7, 5))["step"].fatal
    assert "float16" in choices(gpu(7, 5))["step"].reason
    assert not choices(gpu(7, 5), "float16")["step"].fatal
    monkeypatch.setenv(device.SAMPLER_VARIABLE, "1")
    assert choices(gpu(9, 0))["sampler"].fatal


@pytest.mark.parametrize(("ranks", "kv_bytes"), [(1, 98304), (2, 49152), (4, 24576)])
def test_keys_values_and_rows_fit_together(ranks, kv_bytes):
    """Qwen3-Omni-30B-A3B on GPUs of 80 GB: its keys and values are split over the ranks, its rows are not."""
    from services.thinker.plugin.recording import kv_share  # imports vLLM

    rows = row_bytes((RowKind(hidden_states(24), 2048), MROPE_POSITIONS), torch.bfloat16)
    available = 50 * 1024**3
    share = kv_share(available, kv_bytes, rows)
    slots = share // kv_bytes
    assert slots * (kv_bytes + rows) <= available < (slots + 2) * (kv_bytes + rows)
    assert available - share > 2 * 1024**3  # what went missing before


def test_a_store_has_the_size_that_room_is_left_for():
    kinds = (RowKind(hidden_states(3), 16), MROPE_POSITIONS)
    rows = RowStore(100, kinds, torch.bfloat16, torch.device("cpu"))
    assert rows.size_bytes == 101 * row_bytes(kinds, torch.bfloat16)
    with pytest.raises(KeyError):
        rows.read(hidden_states(0), torch.tensor([0]))
