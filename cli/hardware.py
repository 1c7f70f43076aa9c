"""Commands about machines: `quartet budget` and `quartet doctor`."""

import json
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from cli.terminal import CommandError
from services.common.revisions import pinned
from services.demo_models import resolve
from services.registry import ALIGNER

StageFlags = Annotated[list[str] | None, typer.Option(help="--flag=value for that process; may be repeated")]


Revision = Annotated[
    str | None, typer.Option(help="commit, branch or tag of a --model of the hub; default: its newest commit")
]

AsrModel = Annotated[
    str | None, typer.Option(help="checkpoint that writes down what --model is to hear, e.g. a Whisper")
]
TalkerModel = Annotated[
    str | None, typer.Option(help="checkpoint of a voice that speaks what --model writes, e.g. a Qwen3-TTS")
]
AlignerModel = Annotated[
    str | None, typer.Option(help="checkpoint that says when each word is spoken, e.g. a Qwen3-ForcedAligner")
]

Stage = StrEnum("Stage", ["thinker", "talker", "code2wav", "dit"])
"""Kinds of stages that choose their paths by the machine."""


def at_revision(model: str | None, revision: str | None) -> str | None:
    """`model`, pinned. Raises CommandError."""
    try:
        if model is None and revision is not None:
            raise ValueError("is of a --model of the hub; name that, too")
        return None if model is None else pinned(resolve(model), revision) if revision else model
    except ValueError as error:
        raise CommandError(f"--revision {revision}: {error}") from None


def budget(
    model: Annotated[str | None, typer.Option(help="directory or hub id of a thinker, talker and code2wav")] = None,
    revision: Revision = None,
    asr_model: AsrModel = None,
    talker_model: TalkerModel = None,
    aligner_model: AlignerModel = None,
    gpu_memory_gib: Annotated[float | None, typer.Option(min=1, help="memory of a GPU, as nvidia-smi says")] = None,
    gpus: Annotated[int, typer.Option(min=1, max=64, help="how many GPUs of that memory there are")] = 1,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="GPUs that share the thinker; default: the fewest that hold it")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="spoken answers at a time")] = 8,
    context_tokens: Annotated[int, typer.Option(min=2, help="longest prompt plus output of a request")] = 32_768,
    talker_positions: Annotated[int, typer.Option(min=16, help="longest prompt plus frames of a spoken answer")] = 8192,
    dit_model: Annotated[str | None, typer.Option(help="directory or hub id of a dit, perhaps --model's own")] = None,
    dit_outputs: Annotated[
        int | None, typer.Option(min=1, help="the dit's --max-running-outputs; default: as many of 8 as fit")
    ] = None,
    aligner_audio_s: Annotated[
        float | None, typer.Option(min=1, help="the aligner's --max-batch-audio-s; default: its own")
    ] = None,
    dit_gib: Annotated[float, typer.Option(min=0, help="memory to leave for another dit")] = 0,
    loras: Annotated[int, typer.Option(min=0, help="the thinker's --max-loras, if it takes adapters")] = 0,
    lora_rank: Annotated[int, typer.Option(min=1, help="the thinker's --max-lora-rank")] = 16,
    lora_experts: Annotated[bool, typer.Option("--lora-experts", help="adapters may change experts")] = False,
    table: Annotated[
        bool, typer.Option("--table", help="what fits on which GPUs; default: the published model")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, sizes in bytes")] = False,
) -> None:
    """Say how thinker, talker, code2wav, aligner and dit share GPUs, as settings, or why they cannot."""
    from cli.aligner_memory import with_aligner
    from cli.budget import GIB, Demand, Gpus, Need
    from cli.budget_report import lines
    from cli.budget_report import table as gpu_table
    from cli.check import stage_settings
    from cli.dit_memory import dit_loads
    from cli.gpu_plan import with_asr
    from cli.layouts import best_of
    from cli.plan import SPEECH
    from cli.sizes import published_sizes, read_sizes
    from services.sizes import Sizes
    from services.thinker.lora_targets import EXPERTS, LINEAR

    if not table and ((model is None and dit_model is None) or gpu_memory_gib is None):
        raise typer.BadParameter("needed, but with --table", param_hint="--model or --dit-model, --gpu-memory-gib")
    if dit_model and dit_gib:
        raise typer.BadParameter("the dit is counted by --dit-model; leave it out", param_hint="--dit-gib")
    model = at_revision(model, revision)
    demand = Demand(
        streams,
        context_tokens,
        talker_positions,
        fixed={"dit": Need.whole(int(dit_gib * GIB))} if dit_gib else {},
        max_loras=loras,
        max_lora_rank=lora_rank,
        adapted=(*LINEAR, *(EXPERTS if lora_experts else ())),
    )
    if asr_model:
        demand = with_asr(demand, asr_model)
    if aligner_model:
        flags = [] if aligner_audio_s is None else [f"--max-batch-audio-s={aligner_audio_s:g}"]
        demand = with_aligner(demand, stage_settings(ALIGNER, aligner_model, flags))
    elif aligner_audio_s is not None:
        raise typer.BadParameter("is of an aligner; name it by --aligner-model", param_hint="--aligner-audio-s")
    loads = dit_loads(demand, dit_model, dit_outputs) if dit_model else [demand]
    sizes = read_sizes(model) if model else Sizes({}) if dit_model else published_sizes()
    if ALIGNER in sizes.weights:
        raise CommandError(f"--model {model}: is an aligner; give it by --aligner-model, beside a --model that hears")
    if talker_model:
        sizes = sizes.of(["thinker"]).with_voice(read_sizes(talker_model).of(SPEECH))
    if table or gpu_memory_gib is None:
        shown = gpu_table(sizes, loads)
    else:
        there = Gpus.alike(int(gpu_memory_gib * GIB), gpus)
        shared = best_of(sizes, there, loads, tensor_parallel_size)
        shown = [json.dumps(asdict(shared), indent=2, default=list)] if as_json else lines(shared)
    for line in shown:
        typer.echo(line)


def doctor(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="checkpoint directory or hub id: does it fit? Without, nothing is fetched")
    ] = None,
    revision: Revision = None,
    stage: Annotated[
        list[Stage] | None, typer.Option(help="one that shall start here; may be repeated; default: those of --model")
    ] = None,
    thinker_arg: StageFlags = None,
    talker_arg: StageFlags = None,
    code2wav_arg: StageFlags = None,
    dit_arg: StageFlags = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, sizes in bytes")] = False,
) -> None:
    """Say what this machine is, which path each stage takes on it and why, and what will not start."""
    from rich.console import Console

    try:
        from cli.doctor.fit import stages_of
        from cli.doctor.machine import Machine
        from cli.doctor.report import examine, show
    except ModuleNotFoundError as error:  # where only a gateway is installed
        raise CommandError(f"{error.name} is not installed; stages have it: pip install 'quartet[talker]'") from None

    model = at_revision(None if model is None else resolve(model), revision)
    default = list(Stage) if model is None else stages_of(model)
    flags = {str(kind): ctx.params[f"{kind}_arg"] or () for kind in Stage}
    report = examine(Machine.read(), [str(kind) for kind in stage or default], model, flags)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2, default=sorted))
    else:
        show(report, Console())
    if not report.is_healthy:
        raise typer.Exit(1)
