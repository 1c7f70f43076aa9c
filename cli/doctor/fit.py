"""Checks whether a model fits on a machine, with its stages' settings."""

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cli.budget import GIB
from cli.budget_report import share_lines
from cli.check import HOST_BYTES, too_large
from cli.doctor.judge import Finding, judge_turns, place
from cli.doctor.machine import Machine
from cli.gpu_plan import planned, sets_thinker_memory, thinker_misfit
from cli.gpus import of_devices
from cli.pipeline_sizes import read_pipeline
from cli.plan import is_diffusion
from cli.sizes import TooLittleMemory, read_sizes, stored_dtype
from services.registry import STAGES, family_of, read_config
from services.sizes import weights_dtype
from services.thinker.execution import has_amx, refused_on_cpu

CHECKER = "cosmos_guardrail"
Fit = tuple[tuple[str, ...], tuple[Finding, ...]]  # lines about sizes, what does not fit


def model_dtype(model: str) -> str:
    """Dtype of a checkpoint directory or its diffusers transformer; bfloat16 for a hub id. Raises ValueError."""
    folder = Path(model)
    if is_diffusion(model):
        folders = (folder / name for name in ("transformer", "unet"))
        return stored_dtype(next((each for each in folders if each.is_dir()), folder))
    try:
        return weights_dtype(read_config(folder)) if folder.is_dir() else "bfloat16"
    except ValueError as error:
        raise ValueError(f"--model {model}: {error}") from None


def decoder_dtype(model: str, device: str) -> str | None:
    """What code2wav takes on "cpu" or "cuda:N" for a checkpoint directory, if not its own dtype."""
    from services.code2wav.family import default_dtype

    try:
        config = read_config(Path(model))
        dtype = default_dtype(family_of(config).part("code2wav", config), device.partition(":")[0])
    except ValueError:  # a hub id, or it has none
        return None
    return None if dtype is None else str(dtype).removeprefix("torch.")


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
    """GPUs as `quartet up` would share them out. Raises BudgetError."""
    thinker, for_cpus = settings.get("thinker"), "vllm" not in machine.packages
    lines, findings = (), ()
    if is_diffusion(model):
        served = ("dit", *(["thinker"] if _has_thinker(model) else []))  # a checkpoint of which both serve a side
        settings = {kind: each for kind, each in settings.items() if kind in served}
        thinker = settings.get("thinker")
        if "dit" in settings and place(machine, settings["dit"].device)[0] == "cpu":
            lines, findings = _host(machine, read_pipeline(model, settings["dit"].dtype).weights)
        if "dit" in settings and (lack := lacks_checker(model, settings["dit"])):
            findings = (*findings, Finding(lack))
    if thinker is not None and (for_cpus or place(machine, thinker.device)[0] == "cpu"):
        own_lines, own = _host(machine, read_sizes(model).weights)
        lines, findings = (*lines, *own_lines), (*findings, *own)
        findings = (*findings, *_refused_on_cpu(thinker, model))
    if not machine.devices:
        return lines, findings
    there = of_devices([(device.accelerator.memory_bytes, device.free_bytes) for device in machine.devices])
    try:
        found = planned(settings, there, thinker_on_cpu=for_cpus)
    except TooLittleMemory as error:
        return lines, (*findings, Finding(str(error), fatal=not sets_thinker_memory(settings)))
    if found is None:
        return lines, findings
    misfit = thinker_misfit(found.budget, thinker)
    findings = (*findings, *([Finding(misfit)] if misfit else ()))
    findings = (*findings, *judge_turns(machine, {share.stage: share.gpus for share in found.budget.shares}))
    if flags := [f"--{kind}-arg={flag}" for kind, own in found.flags.items() for flag in own]:
        text = f"`quartet up` gives these flags by itself, and other ways to start need them: {' '.join(flags)}"
        findings = (*findings, Finding(text, fatal=False))
    return (*lines, *share_lines(found.budget)), findings


def _has_thinker(model: str) -> bool:
    """Whether a checkpoint of a dit also has a config.json that a thinker serves."""
    try:
        config = read_config(Path(model))
        return "thinker" in family_of(config).stages(config)
    except ValueError:
        return False


def lacks_checker(model: str, dit: Any) -> str | None:
    """What a pipeline of Cosmos says at its start where its checker of prompts and outputs is not installed."""
    index = Path(model) / "model_index.json"
    if not index.is_file() or dit.safety_checker == "off":
        return None
    stated = json.loads(index.read_text())
    if not str(stated.get("_class_name")).startswith("Cosmos") or stated.get("enable_safety_checker") is False:
        return None
    if importlib.util.find_spec(CHECKER) is not None:
        return None
    return (
        f"dit: {stated['_class_name']} checks prompts and outputs by {CHECKER}, which is not installed: pip install "
        f"{CHECKER}, or give --dit-arg=--safety-checker=off, which the licence of the weights may forbid"
    )


def _refused_on_cpu(thinker: Any, model: str) -> Iterator[Finding]:
    folder = Path(model)
    if folder.is_dir():
        dtype = model_dtype(model) if thinker.dtype == "auto" else thinker.dtype
        if reason := refused_on_cpu(read_config(folder), folder, dtype, has_amx()):
            yield Finding(f"thinker: {reason}")


def _host(machine: Machine, weights: Mapping[str, int]) -> Fit:
    needed, there = sum(weights.values()) + HOST_BYTES, machine.memory_bytes
    lacks = (Finding(too_large(needed, there)),) if needed > there else ()
    return ("weights: " + ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in weights.items()),), lacks
