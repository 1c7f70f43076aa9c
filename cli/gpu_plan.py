"""What `quartet up` and `Omni` set by the memory of this machine's GPUs, where the user has not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from cli.aligner_memory import with_aligner
from cli.budget import (
    CONTEXT_BYTES,
    MIB,
    THINKER_LARGE_BYTES,
    THINKER_STEP_BYTES,
    Budget,
    Demand,
    Gpus,
    Need,
    scaled,
)
from cli.budget_report import GPUS, MOST_GPUS, flag, settings_by_stage, share_lines
from cli.check import check, stage_settings
from cli.dit_memory import FEWER_OUTPUTS, encoder_need, fewer_outputs, with_outputs
from cli.gpus import gpus
from cli.layouts import LayoutError, best, best_of
from cli.pipeline_sizes import read_pipeline
from cli.plan import ASR, DIFFUSION, LaunchError, LaunchOptions, PlannedStage, stages_to_start
from cli.sizes import BudgetError, TooLittleMemory, read_sizes
from services.registry import ALIGNER, EMBEDDER, STAGES
from services.sizes import PipelineSizes, Sizes
from services.thinker.cpu import vllm_is_for_cpus
from services.thinker.lora_targets import adapted_layers

ASR_SOUNDS = 8  # written down at a time
ASR_SOUND_TOKENS = (2048, 4096)  # of a sound and its words: Whisper's 1,500 and 448; those of other models, at most
DIT_OUTPUTS = "8"  # DitSettings' default
_ANY_GPU = ("auto", "cuda")
THINKER_MEMORY = ("gpu_memory_utilization", "kv_cache_bytes")
# Smaller and smaller loads to suggest, if one does not fit: (streams, talker positions, context tokens).
_LESS = ((8, 8192, 16_384), (8, 8192, 8192), (4, 4096, 8192), (2, 4096, 8192), (1, 4096, 8192), (1, 2048, 4096))


@dataclass(frozen=True)
class Launch:
    """What is to be started.

    Attributes:
        stages: with the flags that the GPUs' memory asks for.
        lines: each stage's share of the GPUs, or why they are not shared out; empty if no stage is on a GPU.
    """

    stages: Sequence[PlannedStage]
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Plan:
    """Shares of GPUs; `flags` are those of each stage, by its part, that nobody has set."""

    budget: Budget
    flags: Mapping[str, Sequence[str]]


def plan(options: LaunchOptions, *, starts: bool = True) -> Launch:
    """`starts`: the system will start then. Raises LaunchError: the options are at fault, or the GPUs are too small."""
    stages = stages_to_start(options)
    check(options, stages, starts=starts)
    try:
        return share_gpus(stages, gpus())
    except RuntimeError as error:
        return Launch(stages, (f"GPU memory is not shared out: {error}",))


def share_gpus(stages: Sequence[PlannedStage], there: Gpus) -> Launch:
    """Raises LaunchError: the stages do not fit on the GPUs that are there."""
    if not there.memory:
        return Launch(stages)
    settings = {stage.part: stage_settings(stage.kind, stage.model, stage.flags) for stage in stages}
    try:
        found = planned(settings, there, thinker_on_cpu=vllm_is_for_cpus())
    except TooLittleMemory as error:
        if not sets_thinker_memory(settings):
            raise LaunchError(str(error)) from None
        beside = {part: each for part, each in settings.items() if part != "thinker"}
        found = planned(beside, Gpus.alike(1 << 60, len(there.memory)), thinker_on_cpu=True)
        return Launch(_with_flags(stages, found), (f"note: by an estimate on the safe side {error}",))
    except LayoutError as error:
        raise LaunchError(str(error)) from None
    except BudgetError as error:
        return Launch(stages, (f"GPU memory is not shared out: {error}",))
    if found is None:
        return Launch(stages)
    misfit = thinker_misfit(found.budget, settings.get("thinker"))
    notes = [f"note: {misfit}"] if misfit else []
    if EMBEDDER in settings and settings[EMBEDDER].device != "cpu":
        notes.append("note: the embedder is not counted; give it a GPU of its own, by --embedder-arg=--device=cuda:N")
    return Launch(_with_flags(stages, found), (*share_lines(found.budget), *_unused(found.budget), *notes))


def sets_thinker_memory(settings: Mapping[str, Any]) -> bool:
    """Whether the thinker's memory is set. Then a lack is a note: whoever sets it may know better than an estimate."""
    return any(_set(settings.get("thinker"), name) for name in THINKER_MEMORY)


def _with_flags(stages: Sequence[PlannedStage], found: Plan | None) -> Sequence[PlannedStage]:
    """`stages` with the flags of the plan last, which win over a --device=auto."""
    if found is None:
        return stages
    return [replace(stage, flags=[*stage.flags, *found.flags.get(stage.part, ())]) for stage in stages]


def planned(settings: Mapping[str, Any], there: Gpus, *, thinker_on_cpu: bool) -> Plan | None:
    """Shares for stages with these settings, by their parts, on one GPU or more; None: none of them is on a GPU.

    Raises:
        TooLittleMemory: they do not fit; says the smallest change that does.
        LayoutError: the devices that are set are impossible.
        BudgetError: the model's sizes cannot be read.
    """
    # vLLM gives an embedder the part of a GPU that it is set, which nothing here computes.
    elsewhere = {EMBEDDER, *(("thinker", ASR) if thinker_on_cpu else ())}
    on_gpus = {part: each for part, each in settings.items() if each.device != "cpu" and part not in elsewhere}
    if not on_gpus:
        return None
    pipelines = {kind: read_pipeline(on_gpus[kind].model, on_gpus[kind].dtype) for kind in DIFFUSION & on_gpus.keys()}
    demand, sizes = _demand(on_gpus, pipelines), _sizes(on_gpus)
    pinned, ranks = _pinned(on_gpus, len(there.memory)), _set(settings.get("thinker"), "tensor_parallel_size")
    loads = [demand]
    if "dit" in pipelines and _set(settings["dit"], "max_running_outputs") is None:
        loads = fewer_outputs(demand, pipelines["dit"], settings["dit"])
    try:
        budget = best_of(sizes, there, loads, ranks, pinned)
    except TooLittleMemory as error:
        demand = loads[-1]
        remedies = _remedies(sizes, there, demand, ranks, pinned, settings, pipelines)
        raise TooLittleMemory(error.lack, next(remedies, "take a smaller model"), error.short_bytes) from None
    flags = {part: list(_flags(budget, part, each, demand)) for part, each in on_gpus.items()}
    return Plan(budget, flags)


def thinker_misfit(budget: Budget, thinker: Any) -> str | None:
    """What is wrong with a thinker's memory as it is set."""
    if "THINKER_KV_CACHE_BYTES" not in budget.settings:
        return None
    context, tokens = _set(thinker, "max_context_tokens") or 0, budget.context_tokens
    if _set(thinker, "kv_cache_bytes") and context > tokens:
        return f"thinker: --kv-cache-bytes holds {tokens} tokens, which --max-context-tokens={context} exceeds"
    utilization = _set(thinker, "gpu_memory_utilization")
    if utilization is None:
        return None
    kept, share = budget.settings["THINKER_KV_CACHE_BYTES"], float(budget.settings["THINKER_GPU_MEMORY_UTILIZATION"])
    memory = budget.gpus.memory[budget.layout.thinker[0]]
    flags = f"give --thinker-arg=--kv-cache-bytes={kept} --thinker-arg=--gpu-memory-utilization={share:.3f}"
    own = f"thinker: --gpu-memory-utilization={utilization:g} is"
    if utilization > share + budget.free_bytes(budget.layout.thinker[0]) / memory:  # nobody's share may be just enough
        return f"{own} more than the others leave: {flags}"
    if utilization * memory < budget.shares[0].weights:
        return f"{own} less than the weights take: {flags}"
    return None


def _demand(settings: Mapping[str, Any], pipelines: Mapping[str, PipelineSizes]) -> Demand:
    """The load that stages on GPUs are set for; Demand's own where nothing is. Raises BudgetError."""
    thinker, talker, default = settings.get("thinker"), settings.get("talker"), Demand()
    encoders = {"encoder": encoder_need(pipelines["encoder"], settings["encoder"])} if "encoder" in pipelines else {}
    demand = Demand(
        _set(talker, "max_running_requests") or default.streams,
        _set(thinker, "max_context_tokens") or default.context_tokens,
        _set(talker, "max_context_positions") or default.talker_positions,
        decoder_streams=_set(settings.get("code2wav"), "max_running_requests"),
        kv_cache_bytes=_set(thinker, "kv_cache_bytes"),
        fixed=encoders,
        dit_gpus=settings["dit"].parallel_devices if "dit" in settings else 1,
        **_adapters(thinker),
    )
    if "dit" in pipelines:
        demand = with_outputs(demand, pipelines["dit"], settings["dit"], None)
    if ALIGNER in settings:
        demand = with_aligner(demand, settings[ALIGNER])
    if (asr := settings.get(ASR)) is None:
        return demand
    return with_asr(demand, asr.model, _set(asr, "max_context_tokens"), _set(asr, "kv_cache_bytes"))


def with_asr(
    demand: Demand, model: str, context_tokens: int | None = None, kv_cache_bytes: int | None = None
) -> Demand:
    """Adds a thinker that only writes down speech, of another checkpoint. Raises BudgetError.

    Args:
        context_tokens: of a request; None: what sounds need, at most the model's.
        kv_cache_bytes: None: for `ASR_SOUNDS` at a time.
    """
    sizes = read_sizes(model)
    least, most = ASR_SOUND_TOKENS
    context = context_tokens or min(sizes.max_context_tokens or most, most)
    cache = kv_cache_bytes or ASR_SOUNDS * max(least, context) * sizes.kv_per_token
    weights = sizes.weights["thinker"]
    working = scaled(THINKER_STEP_BYTES, weights, THINKER_LARGE_BYTES) + CONTEXT_BYTES
    need = Need(weights, working, cache, f"KV cache of {cache // sizes.kv_per_token} tokens")
    fixed = {**demand.fixed, ASR: need}
    return replace(demand, fixed=fixed, asr_kv_cache_bytes=cache, asr_context_tokens=context)


def _adapters(thinker: Any) -> dict[str, Any]:
    """Demand's members about adapters. Raises BudgetError."""
    if thinker is None or not thinker.takes_adapters:
        return {}
    try:
        layers = adapted_layers(thinker, on_cpu=False)
    except ValueError as error:
        raise BudgetError(f"thinker: {error}") from None
    return {"max_loras": thinker.max_loras, "max_lora_rank": thinker.max_lora_rank, "adapted": layers}


def _sizes(settings: Mapping[str, Any]) -> Sizes:
    """Of the stages with weights of a family's checkpoint, or of two. Raises BudgetError."""
    kinds_of: dict[str, list[str]] = {}
    for kind in STAGES:
        if kind in settings:
            kinds_of.setdefault(settings[kind].model, []).append(kind)
    sizes = [read_sizes(model).of(kinds) for model, kinds in kinds_of.items()]
    return reduce(Sizes.with_voice, sizes) if sizes else Sizes({})


def _set(settings: Any, name: str) -> Any:
    """The setting's value if a flag, a variable or a file has it, else None."""
    return getattr(settings, name) if settings is not None and name in settings.model_fields_set else None


def _pinned(settings: Mapping[str, Any], count: int) -> dict[str, int]:
    """Indices of the GPUs that are set for stages. Raises LayoutError: there is no such GPU."""
    indices: dict[str, int] = {}
    for kind, each in settings.items():
        device = each.device
        name, _, number = device.partition(":")
        if device == "auto" or (device == "cuda" and kind in ("thinker", ASR, "dit")):  # which may be on several
            continue
        if kind == "dit" and each.parallel_devices > 1:
            raise LayoutError(f"dit: --device={device} is one GPU, and context_parallel needs several; give cuda")
        if name != "cuda" or not (number or "0").isdecimal() or int(number or 0) >= count:
            raise LayoutError(f"{kind}: --device={device}: there are {count} GPUs; give auto, cpu, cuda or cuda:N")
        indices[kind] = int(number or 0)
    return indices


def _remedies(
    sizes: Sizes,
    there: Gpus,
    demand: Demand,
    ranks: int | None,
    pinned: Mapping[str, int],
    settings: Mapping[str, Any],
    pipelines: Mapping[str, PipelineSizes],
) -> Iterator[str]:
    """What would fit, the smallest change first."""
    idle = Gpus(there.memory, (0,) * len(there.memory))
    if any(there.taken) and _fits(sizes, idle, demand, ranks, pinned):
        yield "end what else runs on the GPUs"
    if pinned and _fits(sizes, there, demand, ranks):
        yield "it fits without --device"
    if ranks is not None and _fits(sizes, there, demand):
        yield "it fits without --tensor-parallel-size"
    if "dit" in pipelines:
        dit = settings["dit"]
        for count in FEWER_OUTPUTS if demand.dit_outputs is not None else ():
            fewer = with_outputs(demand, pipelines["dit"], dit, count)
            if count < dit.max_running_outputs and _fits(sizes, there, fewer, ranks, pinned):
                yield f"this fits: --dit-arg=--max-running-outputs={count}"
        offloading = dit.model_copy(update={"offload": "model"})
        moved = with_outputs(demand, pipelines["dit"], offloading, demand.dit_outputs)
        if dit.offload == "none" and _fits(sizes, there, moved, ranks, pinned):
            yield "this fits: --dit-arg=--offload=model"
    if demand.max_loras > 1 and _fits(sizes, there, replace(demand, max_loras=1), ranks, pinned):
        yield "this fits: --thinker-arg=--max-loras=1"
    for streams, positions, context in _LESS:
        less = replace(
            demand,
            streams=min(streams, demand.streams),
            talker_positions=min(positions, demand.talker_positions),
            context_tokens=min(context, demand.context_tokens),
            decoder_streams=None if demand.decoder_streams is None else min(streams, demand.decoder_streams),
        )
        if _fits(sizes, there, less, ranks, pinned):
            before, now = (_flags_of_load(each, sizes) for each in (demand, less))
            if changed := [each for each in now if each not in before]:
                yield f"this fits: {' '.join(changed)}"
    machines = ((count * mib, count, name) for name, mib in GPUS.items() for count in range(1, MOST_GPUS + 1))
    for memory_mib, count, name in sorted(machines):
        if _fits(sizes, Gpus.alike(memory_mib // count * MIB, count), demand):
            yield f"it fits on {count} GPUs of {name}" if count > 1 else f"it fits on a GPU of {name}"


def _flags_of_load(demand: Demand, sizes: Sizes) -> list[str]:
    flags = [
        ("thinker", f"--max-context-tokens={demand.context_tokens}"),
        ("talker", f"--max-running-requests={demand.streams}"),
        ("talker", f"--max-context-positions={demand.talker_positions}"),
    ]
    if demand.decoder_streams is not None or "talker" not in sizes.weights:  # else it follows the talker's
        flags.append(("code2wav", f"--max-running-requests={demand.decoded_streams}"))
    return [f"--{stage}-arg={each}" for stage, each in flags if stage in sizes.weights]


def _fits(sizes: Sizes, there: Gpus, *demand: Any) -> bool:
    try:
        best(sizes, there, *demand)
    except BudgetError:
        return False
    return True


def _flags(budget: Budget, part: str, settings: Any, demand: Demand) -> Iterator[str]:
    """Flags for what is neither set nor the default already."""
    left_out = {name for name in settings.model_fields_set if name != "device" or settings.device not in _ANY_GPU}
    if "gpu_memory_utilization" in left_out and "kv_cache_bytes" not in left_out:
        left_out |= {"kv_cache_bytes", "max_context_tokens"}  # vLLM finds out what that leaves
    elif demand.kv_cache_bytes is not None and budget.context_tokens < demand.context_tokens:
        left_out.add("max_context_tokens")
    defaults = {"device": "cuda:0", "tensor_parallel_size": "1", "max_running_outputs": DIT_OUTPUTS}
    for name, value in settings_by_stage(budget).get(part, {}).items():
        if name not in left_out and defaults.get(name) != value:
            yield flag(name, value)


def _unused(budget: Budget) -> Iterator[str]:
    if unused := [str(gpu) for gpu in range(len(budget.gpus.memory)) if gpu not in budget.layout.used]:
        yield f"not used: GPU {', '.join(unused)}; further replicas can be there, see docs/scaling.md"
