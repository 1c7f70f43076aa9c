"""What `quartet up` and `Omni` set by the memory of this machine's GPUs, where the user has not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cli.budget import CONTEXT_BYTES, GIB, MIB, SPEECH, Budget, Demand, Layout, best, first_fit, layouts
from cli.budget_report import GPUS, MOST_GPUS, settings_by_stage, share_lines
from cli.check import check, stage_settings
from cli.gpus import Gpu, gpus
from cli.plan import DIFFUSION, LaunchError, LaunchOptions, PlannedStage, stages_to_start
from cli.sizes import BudgetError, TooLittleMemory, pipeline_weights, read_sizes
from services.demo_models import resolve
from services.registry import STAGES
from services.sizes import Sizes
from services.thinker.device import vllm_is_for_cpus

DIT_STEP_BYTES = 3 * GIB  # activations of an image of 1024 x 1024 pixels, and of its decoding
DRIVER_BYTES = GIB  # less than this is no other program's
# Smaller and smaller loads to suggest, if one does not fit: (streams, talker positions, context tokens).
_LESS = ((8, 8192, 16_384), (8, 8192, 8192), (4, 4096, 8192), (2, 4096, 8192), (1, 4096, 8192), (1, 2048, 4096))


@dataclass(frozen=True)
class Launch:
    """What is to be started.

    Attributes:
        stages: with the flags that the GPUs' memory asks for.
        lines: each stage's share of the GPUs, or why they are not shared out; empty without GPUs.
    """

    stages: Sequence[PlannedStage]
    lines: Sequence[str] = ()


def plan(options: LaunchOptions) -> Launch:
    """Raises LaunchError: the options are at fault, or the GPUs are too small."""
    stages = stages_to_start(options)
    check(options, stages)
    return share_gpus(stages, gpus())


def share_gpus(stages: Sequence[PlannedStage], there: Sequence[Gpu]) -> Launch:
    """Raises LaunchError: the stages do not fit on the GPUs that are there."""
    settings = {stage.kind: stage_settings(stage.kind, stage.model, stage.flags) for stage in stages}
    on_gpus = [stage for stage in stages if there and _is_on_gpu(stage.kind, settings[stage.kind])]
    if not on_gpus:
        return Launch(stages)
    try:
        sizes = _sizes(on_gpus)
    except BudgetError as error:
        return Launch(stages, (f"GPU memory is not shared out, as sizes are not known: {error}",))
    demand = _demand(settings, there, on_gpus)
    try:
        budget = fitting(sizes, settings, min(gpu.memory_bytes for gpu in there), len(there), demand)
    except BudgetError as error:
        raise LaunchError(str(error)) from None
    if "thinker" in sizes.weights and (misfit := thinker_misfit(budget, settings["thinker"])):
        raise LaunchError(misfit)
    with_flags = [
        replace(stage, flags=[*_flags(budget, stage, settings[stage.kind]), *stage.flags]) for stage in stages
    ]
    return Launch(with_flags, (*share_lines(budget), *_unused(budget, len(there))))


def fitting(sizes: Sizes, settings: Mapping[str, Any], gpu_bytes: int, count: int, demand: Demand) -> Budget:
    """The best budget that leaves what the user has set. Raises BudgetError, with the smallest remedy."""
    ranks = _set_by_user(settings.get("thinker"), "tensor_parallel_size")
    candidates = [_as_set(each, settings) for each in layouts(sizes, count, ranks, has_dit=bool(demand.dit_bytes))]
    if not candidates:
        return best(sizes, gpu_bytes, count, demand, ranks)  # raises with the reason
    try:
        return first_fit(sizes, gpu_bytes, demand, candidates)
    except TooLittleMemory as error:
        remedy = next(_remedies(sizes, gpu_bytes, demand, candidates), "take a smaller model")
        raise BudgetError(f"{error.lack}: {remedy}") from None


def thinker_misfit(budget: Budget, thinker: Any) -> str | None:
    """What is wrong with a thinker's memory as the user has set it."""
    kept, share = (
        int(budget.settings["THINKER_KV_CACHE_BYTES"]),
        float(budget.settings["THINKER_GPU_MEMORY_UTILIZATION"]),
    )
    flags = f"--kv-cache-bytes={kept} --gpu-memory-utilization={share:.3f}"
    spare = budget.free_bytes(budget.layout.thinker[0])  # what a budget leaves to nobody may be just enough
    requested = thinker.kv_cache_bytes
    utilization = _set_by_user(thinker, "gpu_memory_utilization")
    if requested is not None and requested > kept + spare:
        return f"thinker: --kv-cache-bytes={requested} is more than there is: give {flags}"
    if utilization is not None and utilization > share + spare / budget.gpu_bytes:
        return f"thinker: --gpu-memory-utilization={utilization:g} is more than the others leave: give {flags}"
    return None


def demand_of(settings: Mapping[str, Any], **more: int) -> Demand:
    """The load that the settings are for; Demand's own where the user has set none."""
    talker, least = settings.get("talker"), Demand()
    return Demand(
        _set_by_user(talker, "max_running_requests") or least.streams,
        _set_by_user(settings.get("thinker"), "max_context_tokens") or least.context_tokens,
        _set_by_user(talker, "max_context_positions") or least.talker_positions,
        **more,
    )


def _demand(settings: Mapping[str, Any], there: Sequence[Gpu], on_gpus: Sequence[PlannedStage]) -> Demand:
    taken = max(max(0, gpu.memory_bytes - gpu.free_bytes - DRIVER_BYTES) for gpu in there)
    dits = [Path(resolve(stage.model)) for stage in on_gpus if stage.kind == "dit"]
    needed = [dit_bytes(pipeline_weights(folder), settings["dit"]) for folder in dits if folder.is_dir()]
    return demand_of(settings, dit_bytes=sum(filter(None, needed)), taken_bytes=taken)


def dit_bytes(weights: Mapping[str, int], settings: Any) -> int | None:
    """What a dit with these models takes; None: only what its settings leave on the GPU."""
    if settings.quantization != "none" or settings.offload in ("group", "sequential"):
        return None
    resident = max(weights.values()) if settings.offload == "model" else sum(weights.values())
    return resident + CONTEXT_BYTES + DIT_STEP_BYTES


def _sizes(stages: Sequence[PlannedStage]) -> Sizes:
    """Of the stages on GPUs. Raises BudgetError."""
    kinds = [stage.kind for stage in stages if stage.kind not in DIFFUSION]
    model = next((stage.model for stage in stages if stage.kind in kinds), None)
    return Sizes({}) if model is None else read_sizes(model).of(kinds)


def _is_on_gpu(kind: str, settings: Any) -> bool:
    return not vllm_is_for_cpus() if kind == STAGES[0] else settings.device != "cpu"


def _set_by_user(settings: Any, name: str) -> Any:
    """The setting's value; None where it is the default."""
    return getattr(settings, name) if settings is not None and name in settings.model_fields_set else None


def _as_set(layout: Layout, settings: Mapping[str, Any]) -> Layout:
    """With the devices that the user has set."""
    devices = {kind: _set_by_user(settings.get(kind), "device") or "auto" for kind in STAGES + SPEECH[-1:]}
    indices = {kind: int(device.partition(":")[2] or 0) for kind, device in devices.items() if device != "auto"}
    first = indices.pop("thinker", 0)
    ranks = range(first, first + len(layout.thinker))
    return Layout(ranks, {**layout.others, **{kind: gpu for kind, gpu in indices.items() if kind in layout.others}})


def _remedies(sizes: Sizes, gpu_bytes: int, demand: Demand, candidates: Sequence[Layout]) -> Iterator[str]:
    """What would fit, the smallest change first."""
    for streams, positions, context in _LESS:
        less = replace(
            demand,
            streams=min(streams, demand.streams),
            talker_positions=min(positions, demand.talker_positions),
            context_tokens=min(context, demand.context_tokens),
        )
        try:
            first_fit(sizes, gpu_bytes, less, candidates)
        except TooLittleMemory:
            continue
        flags = {
            "--thinker-arg=--max-context-tokens": (less.context_tokens, demand.context_tokens),
            "--talker-arg=--max-running-requests": (less.streams, demand.streams),
            "--talker-arg=--max-context-positions": (less.talker_positions, demand.talker_positions),
        }
        yield "this fits: " + " ".join(f"{flag}={now}" for flag, (now, before) in flags.items() if now != before)
    machines = ((count * mib, count, name) for name, mib in GPUS.items() for count in range(1, MOST_GPUS + 1))
    for memory_mib, count, name in sorted(machines):
        try:
            best(sizes, memory_mib // count * MIB, count, replace(demand, taken_bytes=0))
        except BudgetError:
            continue
        yield f"it fits on {count} GPUs of {name}" if count > 1 else f"it fits on a GPU of {name}"


def _flags(budget: Budget, stage: PlannedStage, settings: Any) -> Iterator[str]:
    """Flags of `stage` for what is neither set nor the default already."""
    known: set[str] = settings.model_fields_set
    memory = {"gpu_memory_utilization", "kv_cache_bytes"}
    if memory & known:  # each is of no use without the other one
        known = known | memory
    for name, value in settings_by_stage(budget).get(stage.kind, {}).items():
        if name not in known and str(getattr(settings, name)) != value:
            yield f"--{name.replace('_', '-')}={value}"


def _unused(budget: Budget, count: int) -> Iterator[str]:
    if unused := [str(gpu) for gpu in range(count) if gpu not in budget.layout.used]:
        yield f"not used: GPU {', '.join(unused)}; further replicas can be there, see docs/scaling.md"
