"""Checks whether a model fits on a machine, with its stages' settings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cli.budget import GIB
from cli.budget_report import share_lines
from cli.check import HOST_BYTES, too_large
from cli.doctor.judge import Finding, place
from cli.doctor.machine import Machine
from cli.gpu_plan import demand_of, dit_bytes, fitting, thinker_misfit
from cli.plan import is_diffusion
from cli.sizes import pipeline_weights, read_sizes, stored_dtype
from services.registry import STAGES, family_of, read_config
from services.sizes import Sizes, weights_dtype
from services.thinker.execution import has_amx, refused_on_cpu

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
    """As `quartet up` would share them out; the smallest GPU counts. Raises BudgetError."""
    gpu_bytes = min(device.accelerator.memory_bytes for device in machine.devices)
    budget = fitting(sizes.of(settings), settings, gpu_bytes, len(machine.devices), demand_of(settings))
    misfit = thinker_misfit(budget, settings["thinker"])
    return tuple(share_lines(budget)), (Finding(misfit),) if misfit else ()


def _host(machine: Machine, weights: Mapping[str, int]) -> Fit:
    return _compare(weights, sum(weights.values()) + HOST_BYTES, machine.memory_bytes)


def _dit(machine: Machine, settings: Any, folder: Path) -> Fit:
    weights = pipeline_weights(folder)
    device, accelerator = place(machine, settings.device)
    if accelerator is None:
        return _host(machine, weights)
    needed = dit_bytes(weights, settings)
    if needed is None:
        return (f"{_weights_line(weights)}; on the device only what the settings leave there",), ()
    return _compare(weights, needed, accelerator.memory_bytes, device, "--offload=model, or another GPU")


def _compare(weights: Mapping[str, int], needed: int, there: int, *place_and_remedy: str) -> Fit:
    lacks = (Finding(too_large(needed, there, *place_and_remedy)),) if needed > there else ()
    return (_weights_line(weights),), lacks


def _weights_line(weights: Mapping[str, int]) -> str:
    return "weights: " + ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in weights.items())
