"""Checks whether a model fits on a machine, with its stages' settings."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cli.budget import CONTEXT_BYTES, GIB, Budget, Demand, Layout, best, share_lines, share_out, up_flags
from cli.check import HOST_BYTES, too_large
from cli.doctor.judge import Finding, place
from cli.doctor.machine import Machine
from cli.plan import is_diffusion
from cli.sizes import TooLittleMemory, read_sizes, stored_dtype, tensor_bytes
from services.registry import STAGES, family_of, read_config
from services.sizes import Sizes, weights_dtype
from services.thinker.execution import has_amx, refused_on_cpu

LEAST_CONTEXT_TOKENS = 8192  # where no setting says so, vLLM takes what its cache holds
DIT_STEP_BYTES = 3 * GIB  # activations of an image of 1024 x 1024 pixels, and of its decoding

Fit = tuple[tuple[str, ...], tuple[Finding, ...]]  # lines about sizes, what does not fit


def model_dtype(model: str) -> str:
    """Dtype of a checkpoint directory or its diffusers transformer; bfloat16 for a hub id. Raises ValueError."""
    folder = Path(model)
    if is_diffusion(model):
        return stored_dtype(folder / ("transformer" if (folder / "transformer").is_dir() else "unet"))
    try:
        return weights_dtype(read_config(folder)) if folder.is_dir() else "bfloat16"
    except ValueError as error:
        raise ValueError(f"--model {model}: {error}") from None


def stages_of(model: str) -> Sequence[str]:
    """Stages that serve a checkpoint; all if it cannot be read."""
    if is_diffusion(model):
        return ("dit",)
    try:
        config = read_config(Path(model))
        return family_of(config).stages(config)
    except ValueError:
        return STAGES


def fit(machine: Machine, settings: Mapping[str, Any], model: str) -> Fit:
    """Raises BudgetError."""
    if is_diffusion(model):
        return _dit(machine, settings["dit"], Path(model)) if "dit" in settings else ((), ())
    if "thinker" not in settings:
        return (), ()
    sizes = read_sizes(model)
    if place(machine, settings["thinker"].device)[0] == "cpu":
        lines, findings = _host(machine, sizes.weights)
        folder, dtype = Path(model), settings["thinker"].dtype
        if folder.is_dir():
            dtype = model_dtype(model) if dtype == "auto" else dtype
            if reason := refused_on_cpu(read_config(folder), folder, dtype, has_amx()):
                findings = (*findings, Finding(f"thinker: {reason}"))
        return lines, findings
    return _omni(machine, settings, sizes)


def _omni(machine: Machine, settings: Mapping[str, Any], sizes: Sizes) -> Fit:
    """The smallest GPU counts."""
    gpu_bytes = min(device.accelerator.memory_bytes for device in machine.devices)
    thinker, talker = settings["thinker"], settings.get("talker")
    demand = Demand(context_tokens=thinker.max_context_tokens or LEAST_CONTEXT_TOKENS)
    if talker is not None:
        demand = Demand(talker.max_running_requests, demand.context_tokens, talker.max_context_positions)
    try:
        budget = share_out(sizes, gpu_bytes, demand, _layout(machine, settings))
    except TooLittleMemory as error:
        return (), (Finding(f"as set, {error.lack}: {_remedy(sizes, gpu_bytes, len(machine.devices), demand)}"),)
    return tuple(share_lines(budget)), tuple(_thinker_share(budget, thinker))


def _layout(machine: Machine, settings: Mapping[str, Any]) -> Layout:
    ranks = settings["thinker"].tensor_parallel_size
    first = int(place(machine, settings["thinker"].device)[0].partition(":")[2])
    thinker = {f"cuda:{index}" for index in range(first, first + ranks)}
    speech = {place(machine, settings[stage].device)[0] for stage in ("talker", "code2wav") if stage in settings}
    return Layout(ranks, apart=bool(speech) and not thinker & speech)


def _remedy(sizes: Sizes, gpu_bytes: int, gpus: int, demand: Demand) -> str:
    try:
        return f"this fits: {' '.join(up_flags(best(sizes, gpu_bytes, gpus, demand)))}"
    except TooLittleMemory:
        return (
            "take more or larger GPUs (docs/gpus.md), or lower --max-context-tokens of the thinker, "
            "--max-running-requests and --max-context-positions of the talker"
        )


def _thinker_share(budget: Budget, thinker: Any) -> Iterator[Finding]:
    kept, share = int(budget.settings["THINKER_KV_CACHE_BYTES"]), budget.settings["THINKER_GPU_MEMORY_UTILIZATION"]
    flags = f"--kv-cache-bytes={kept} --gpu-memory-utilization={share}"
    spare = budget.free_bytes(0)  # what a budget leaves to nobody may be just enough
    requested = thinker.kv_cache_bytes
    if requested is not None and requested > kept + spare:
        yield Finding(f"thinker: --kv-cache-bytes={requested} is more than there is: give {flags}")
    elif thinker.gpu_memory_utilization > float(share) + spare / budget.gpu_bytes:
        utilization = f"--gpu-memory-utilization={thinker.gpu_memory_utilization:g}"
        yield Finding(f"thinker: {utilization} is more than the others leave: give {flags}")
    elif requested is None and not budget.layout.apart:
        yield Finding(f"thinker: its KV cache depends on which stage starts first: give {flags}", fatal=False)


def _host(machine: Machine, weights: Mapping[str, int]) -> Fit:
    return _compare(weights, sum(weights.values()) + HOST_BYTES, machine.memory_bytes)


def _dit(machine: Machine, settings: Any, folder: Path) -> Fit:
    """Each model of the pipeline has a folder."""
    parts = {path.name: path for path in sorted(folder.iterdir()) if any(path.glob("*.safetensors"))}
    weights = {name: sum(size for _, size in tensor_bytes(path)) for name, path in parts.items()}
    device, accelerator = place(machine, settings.device)
    if accelerator is None:
        return _host(machine, weights)
    if settings.quantization != "none" or settings.offload in ("group", "sequential"):
        return (f"{_weights_line(weights)}; on the device only what the settings leave there",), ()
    resident = max(weights.values()) if settings.offload == "model" else sum(weights.values())
    needed, remedy = resident + CONTEXT_BYTES + DIT_STEP_BYTES, "--offload=model, or another GPU"
    return _compare(weights, needed, accelerator.memory_bytes, device, remedy)


def _compare(weights: Mapping[str, int], needed: int, there: int, *place_and_remedy: str) -> Fit:
    lacks = (Finding(too_large(needed, there, *place_and_remedy)),) if needed > there else ()
    return (_weights_line(weights),), lacks


def _weights_line(weights: Mapping[str, int]) -> str:
    return "weights: " + ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in weights.items())
