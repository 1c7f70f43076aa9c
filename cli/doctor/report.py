"""Builds and prints the doctor's report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli.budget import GIB
from cli.check import stage_settings
from cli.doctor.fit import decoder_dtype, fit, model_dtype
from cli.doctor.judge import Finding, judge_around, judge_machine, judge_turns, judge_vllm, place
from cli.doctor.machine import Machine
from cli.sizes import BudgetError
from services.common.engine.device import Accelerator, Choice

_PART_WIDTH, _PATH_WIDTH = 10, 24  # characters; of all tables alike


@dataclass(frozen=True)
class StagePaths:
    """`device` is "cpu" or "cuda:N"."""

    stage: str
    device: str
    dtype: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Report:
    """`sizes` are lines about the model, if one was named."""

    machine: Machine
    stages: tuple[StagePaths, ...]
    sizes: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def is_healthy(self) -> bool:
        return not any(finding.fatal for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "stages": {paths.stage: asdict(paths) for paths in self.stages}}


def examine(
    machine: Machine,
    stages: Sequence[str],
    model: str | None = None,
    flags: Mapping[str, Sequence[str]] | None = None,
) -> Report:
    """Reports what `stages` would do on `machine`, with their `flags` and environment variables.

    Args:
        model: directory or hub id; None: the published dtypes, without sizes.
    """
    findings, settings, paths, sizes = [*judge_machine(machine)], {}, [], ()
    findings += judge_vllm(machine) if "thinker" in stages else ()
    try:
        dtype = model_dtype(model) if model is not None else "bfloat16"
    except ValueError as error:
        findings.append(Finding(str(error)))
        model, dtype = None, "bfloat16"  # no more is to be known of it
    for stage in stages:
        try:
            settings[stage] = stage_settings(stage, model or "unknown", (flags or {}).get(stage, ()))
            paths.append(_paths(machine, stage, settings[stage], dtype, model))
            findings += judge_around(machine, stage, settings[stage])
        except ValueError as error:
            findings.append(Finding(f"{stage}: {error}"))
    findings += [Finding(f"{stage.stage}: {c.reason}") for stage in paths for c in stage.choices if c.fatal]
    if model is None and len(machine.devices) == 1:  # of several, `quartet up` gives each stage its own
        findings += judge_turns(machine, {each.stage: (0,) for each in paths if each.device != "cpu"})
    if model is not None and len(paths) == len(stages):
        try:
            sizes, misfits = fit(machine, settings, model)
            findings += misfits
        except BudgetError as error:
            findings.append(Finding(str(error)))
    return Report(machine, tuple(paths), sizes, tuple(findings))


def _paths(machine: Machine, stage: str, settings: Any, dtype: str, model: str | None) -> StagePaths:
    """Raises ValueError: there is no such device."""
    device, accelerator = _thinker_place(machine, settings) if stage == "thinker" else place(machine, settings.device)
    if settings.dtype != "auto":
        dtype = settings.dtype
    elif stage == "code2wav" and model is not None:
        dtype = decoder_dtype(model, device) or dtype
    choices = import_module(f"services.{stage}.execution").choices(settings, accelerator, dtype)
    return StagePaths(stage, device, dtype, tuple(choices))


def _thinker_place(machine: Machine, settings: Any) -> tuple[str, Accelerator | None]:
    from services.thinker.device import visible_devices

    for_cpus, ranks = "vllm" not in machine.packages, settings.tensor_parallel_size
    visible_devices(settings.device, ranks, for_cpus=for_cpus, cuda_devices=len(machine.devices), visible=None)
    return ("cpu", None) if for_cpus else place(machine, settings.device)


def show(report: Report, console: Console) -> None:
    console.print(_table("this machine", _facts(report.machine)))
    for paths in report.stages:
        rows = [(choice.part, choice.path, choice.reason) for choice in paths.choices]
        console.print()
        console.print(_table(f"{paths.stage} on {paths.device} in {paths.dtype}", rows))
    console.print()
    if report.sizes:
        console.print(*report.sizes, "", sep="\n", highlight=False, markup=False)
    for finding in sorted(report.findings, key=lambda finding: not finding.fatal):
        console.print("[red]will not start:[/red]" if finding.fatal else "[yellow]note:[/yellow]", end=" ")
        console.print(finding.text, highlight=False, markup=False, soft_wrap=True)
    if report.is_healthy:
        console.print(f"[green]{', '.join(paths.stage for paths in report.stages)} can start here[/green]")


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    for min_width in (_PART_WIDTH, _PATH_WIDTH)[: len(rows[0]) - 1]:
        table.add_column(min_width=min_width)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _facts(machine: Machine) -> list[tuple[str, str]]:
    shared = f"{machine.shared_memory_bytes / GIB:.1f} GiB, {machine.shared_memory_free_bytes / GIB:.1f} free"
    return [
        ("system", machine.system),
        ("CPU", f"{machine.cores} cores, {' '.join(sorted(machine.cpu_flags)) or 'no vector units known'}"),
        ("memory", f"{machine.memory_bytes / GIB:.1f} GiB"),
        ("driver", machine.driver or "none: nvidia-smi says nothing"),
        ("CUDA", machine.torch_cuda or "none: torch is a CPU build"),
        *_gpu_facts(machine),
        ("nvcc", machine.nvcc or "none"),
        ("compilers", " ".join(machine.compilers) or "none"),
        ("/dev/shm", shared),
        ("MPS", machine.mps or "none"),
        ("UCX", " ".join(machine.ucx) or "not installed"),
        ("packages", ", ".join(f"{name} {version}" for name, version in machine.packages.items())),
    ]


def _gpu_facts(machine: Machine) -> Iterator[tuple[str, str]]:
    for index, device in enumerate(machine.devices):
        gpu = device.accelerator
        memory = f"{gpu.memory_bytes / GIB:.1f} GiB, {device.free_bytes / GIB:.1f} free"
        yield f"GPU {index}", f"{gpu.name}, {gpu.architecture}, {memory}"
    if not machine.devices:
        yield "GPUs", f"none for torch; the driver has {len(machine.gpus)}" if machine.gpus else "none"
    elif len(machine.devices) > 1:
        peers = "each reaches each other's memory" if machine.peers else "not all reach each other's memory"
        yield "links", f"{machine.links or 'no NVLink'}; {peers}"
