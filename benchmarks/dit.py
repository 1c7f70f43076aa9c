"""Images, videos and sound: the dit stage beside plain diffusers on the same weights, in one run (`make bench-dit`).

Each checkpoint: N outputs, one after another and at once, by diffusers and by the stage's process over gRPC. Then, on a
checkpoint for videos, an image during a video. Both sides are up at the same time and take turns; no figures are
printed unless their outputs are the same. docs/benchmarks.md defines every figure.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers as diffusers_library
from rich.console import Console

import cli
from benchmarks.diffusion import video as dit_video
from benchmarks.diffusion.report import Result, Row
from benchmarks.diffusion.sides import Diffusers, Quartet
from benchmarks.diffusion.work import Size, Turn, Wish, apart, class_of, repeated, size_for, wishes
from cli.tiny import FAMILIES, make_checkpoint
from quartet.v1 import dit_pb2, server_info_pb2
from services.diffusion.families import family_of

DEFAULT_FAMILIES = ("sd3", "flux", "flux2-klein", "qwen-image", "z-image", "wan", "stable-audio", "cosmos3", "bagel")
TAKES_PICTURES = ("qwen-image-edit", "wan-i2v")
KNOWN = tuple(family for family in (*FAMILIES, "cosmos3", "bagel") if family not in TAKES_PICTURES)
PICTURE = Path(cli.__file__).parent / "assets" / "shapes.png"
KEPT_MIB = 64  # the stage's default
# Of requests to checkpoints that are made here, where the command line says nothing.
TINY = {"width_height": (64, 64), "steps": 8, "frames": 5, "audio_s": 0.2}
SETTLE_S = 0.5  # so that neither side's last step runs into the other's turn

console = Console(width=None if sys.stdout.isatty() else 140)


@dataclass(frozen=True)
class Variant:
    """A dit stage with settings of its own; `flags` are of its command line."""

    name: str
    flags: tuple[str, ...]

    def title(self) -> str:
        """How rows begin."""
        return f"Quartet {self.name}".strip()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `variants` and `width_height` (pixels or None) are added to what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--model", type=Path, help="checkpoint directory; default: a new `quartet tiny` for each family")
    where.add_argument(
        "--families", default=",".join(DEFAULT_FAMILIES), help="of `quartet tiny --arch`, commas between"
    )
    parser.add_argument("--tiny-size", choices=["tiny", "small"], default="tiny", help="of the checkpoints made")
    parser.add_argument("--requests", type=int, default=8, help="outputs of a load (8)")
    parser.add_argument("--steps", type=int, help="denoising steps; default: 8, or with --model its own")
    parser.add_argument("--size", help="WIDTHxHEIGHT in pixels; default: 64x64, or with --model its own")
    parser.add_argument("--frames", type=int, help="of a video; default: 5, or with --model its own")
    parser.add_argument("--audio-s", type=float, help="seconds of sound; default: 0.2, or with --model its own")
    parser.add_argument("--guidance", type=float, help="default: the model's")
    parser.add_argument("--seed", type=int, default=0, help="of the first output")
    parser.add_argument("--rounds", type=int, default=3, help="times each side's turn is repeated")
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of both sides; default: as it is, or torch's own")
    parser.add_argument(
        "--dit-flag", action="append", default=[], metavar="SETTING=VALUE", help="of every dit stage; may be repeated"
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME:SETTING=VALUE,...",
        help="a dit stage of its own, beside the others; its outputs need not be exact; may be repeated",
    )
    parser.add_argument(
        "--repeated",
        action="store_true",
        help="all requests have one prompt, and edit one picture where the model can; a stage that keeps encodings is "
        "beside one that makes them anew, in place of --variant",
    )
    parser.add_argument("--most-apart", type=int, help="steps of 8 bit (1), of PCM16 (2), that outputs may differ by")
    parser.add_argument("--no-video", action="store_true", help="leave out the picture during a video")
    parser.add_argument("--video-frames", type=int, default=17, help="of that video (17)")
    parser.add_argument("--video-size", default="128x128", help="WIDTHxHEIGHT of that video and that picture (128x128)")
    parser.add_argument("--video-steps", type=int, default=12, help="of that video and that picture (12)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    for name in ("requests", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: must be 1 or more")
    if options.video_steps <= dit_video.SENT_AFTER_STEP:
        parser.error(f"--video-steps: must be over {dit_video.SENT_AFTER_STEP}")
    options.families = options.families.split(",")
    for family in options.families:
        if family not in KNOWN:
            parser.error(f"--families: there is no '{family}'; take of {', '.join(KNOWN)}")
    try:
        options.width_height = options.size and pixels("--size", options.size)
        options.video_width_height = pixels("--video-size", options.video_size)
        every = [flag("--dit-flag", each) for each in options.dit_flag]
        if options.repeated and options.variant:
            raise ValueError("--repeated: has variants of its own; leave out --variant")
        given = [f"kept:encoding_cache_mib={KEPT_MIB}", "anew:"] if options.repeated else options.variant
        options.variants = [variant(each, every) for each in given] or [Variant("", encoding(every))]
    except ValueError as error:
        parser.error(str(error))
    return options


def pixels(option: str, text: str) -> tuple[int, int]:
    """(width, height) from "WIDTHxHEIGHT". Raises ValueError: it is something else."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise ValueError(f"{option} {text}: must be WIDTHxHEIGHT")
    width, height = map(int, text.split("x"))
    return width, height


def flag(option: str, text: str) -> str:
    """A flag of the dit stage from "setting=value". Raises ValueError: it is something else."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"{option} {text}: must be SETTING=VALUE")
    return f"--{name.replace('_', '-')}={value}"


def variant(text: str, every: Sequence[str]) -> Variant:
    """From "name:setting=value,setting=value"; `every` are flags that all have. Raises ValueError: something else."""
    name, colon, settings = text.partition(":")
    if not (name and colon):
        raise ValueError(f"--variant {text}: must be NAME:SETTING=VALUE,SETTING=VALUE, or NAME: for none")
    flags = [flag("--variant", each) for each in settings.split(",") if each]
    return Variant(name, encoding([*every, *flags]))


def encoding(flags: Sequence[str]) -> tuple[str, ...]:
    """`flags`, with which prompts that come again are encoded again, as by diffusers, if they say nothing of it."""
    name = "--encoding-cache-mib="
    return (*flags, *([] if any(each.startswith(name) for each in flags) else [f"{name}0"]))


@contextlib.contextmanager
def started(model: Path, options: argparse.Namespace, scratch: Path) -> Iterator[tuple[list[Quartet], Diffusers]]:
    """A stage of each variant, and diffusers; all ready."""
    with contextlib.ExitStack() as stack:
        stages = []
        for each in options.variants:
            stages.append(Quartet(each.title(), model, each.flags, scratch))
            stack.callback(stages[-1].close)
        for stage in stages:
            stage.wait_until_ready()
        if stages[0].info.dit.tasks[0] in (dit_pb2.DIT_TASK_IMAGE_EDIT, dit_pb2.DIT_TASK_IMAGE_TO_VIDEO):
            sys.exit(f"{model}: {stages[0].info.dit.pipeline} needs a picture to begin with; that is not measured here")
        diffusers = Diffusers(model, stages[0].info, scratch)
        stack.callback(diffusers.close)
        diffusers.wait_until_ready()
        yield stages, diffusers


def compare(
    title: str, asked: Sequence[Wish], stages: Sequence[Quartet], diffusers: Diffusers, options: argparse.Namespace
) -> Result:
    """Runs all sides under both loads. Ends the program if Quartet's outputs differ, unless variants were requested."""
    count, info = len(asked), stages[0].info.dit
    peer = "diffusers" if hasattr(diffusers_library, info.pipeline) else info.pipeline
    rows = [Row(f"{peer}, one after another", False)]
    runs: list[Callable[[], Turn]] = [lambda: diffusers.run(asked, False)]
    if info.batched and peer == "diffusers":  # else the class takes one prompt
        rows.append(Row(f"{peer}, one call for {count}", False))
        runs.append(lambda: diffusers.run(asked, True))
    for stage in stages:
        rows += [Row(f"{stage.name}, one after another", True), Row(f"{stage.name}, {count} at once", True)]
        runs += [lambda stage=stage: stage.run(asked, False), lambda stage=stage: stage.run(asked, True)]
    wanted = runs[0]().outputs
    for row, run in zip(rows[1:], runs[1:], strict=True):  # which also warms up
        row.apart = apart(run().outputs, wanted)
    require_same(title, rows, options, asked[0].size)
    turns = list(zip(rows, runs, strict=True))
    for number in range(options.rounds):
        for row, run in turns if number % 2 == 0 else reversed(turns):
            time.sleep(SETTLE_S)
            turn = run()
            row.apart, turn.outputs = max(row.apart, apart(turn.outputs, wanted)), []  # not kept, for they are large
            row.turns.append(turn)
        require_same(title, rows, options, asked[0].size)
    return Result(title, count, rows)


def require_same(title: str, rows: Sequence[Row], options: argparse.Namespace, size: Size) -> None:
    """Ends the program if Quartet's outputs are not those of diffusers, unless variants were requested."""
    limit = most_apart(options, size)
    differing = [f"{row.title}: {row.apart} apart" for row in rows if row.is_quartet and row.apart > limit]
    if differing and not options.variant:
        sys.exit(
            f"no figures, for outputs are not those of diffusers ({title}): {'; '.join(differing)}; "
            "--variant shows such rows"
        )


def most_apart(options: argparse.Namespace, size: Size) -> int:
    """Steps of 8 bit pixels, or of PCM16, that a batch of another size may round a value otherwise by."""
    if options.most_apart is not None:
        return options.most_apart
    return 2 if size.audio_s else 1


def video_wish(stage: Quartet, options: argparse.Namespace) -> Wish | None:
    """The video that an image comes into; None where the model makes none."""
    info = stage.info.dit
    if options.no_video or not info.frames_multiple:
        return None
    asked = {"width_height": options.video_width_height, "frames": options.video_frames, "steps": options.video_steps}
    return wishes(1, size_for(info, **asked, guidance=options.guidance), options.seed)[0]


def edits(info: server_info_pb2.DitInfo) -> bool:
    """Whether the class that makes pictures of texts also changes pictures."""
    return dit_pb2.DIT_TASK_IMAGE_EDIT in info.tasks and not family_of(class_of(info.pipeline)).edit


def measure(title: str, model: Path, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """One checkpoint: measures, prints, returns all figures."""
    own = {} if options.model else TINY
    keys = ("width_height", "steps", "frames", "audio_s", "guidance")
    asked = {key: value if (value := getattr(options, key)) is not None else own.get(key) for key in keys}
    with started(model, options, scratch) as (stages, diffusers):
        info = stages[0].info
        size = size_for(info.dit, **asked)
        asked_for = wishes(options.requests, size, options.seed)
        if options.repeated:
            asked_for = repeated(asked_for, PICTURE.read_bytes() if edits(info.dit) else None)
        result = compare(title, asked_for, stages, diffusers, options)
        what = ", one prompt" * options.repeated + ", edits of one picture" * bool(asked_for[0].picture)
        console.print(f"[bold]{title}[/bold]: {info.dit.pipeline}, {info.dtype} on {info.device}, {size}{what}")
        console.print(result.table(most_apart(options, size)))
        report = result.to_json() | {"pipeline": info.dit.pipeline, "device": info.device, "size": str(size)}
        if video := video_wish(stages[0], options):
            rounds = dit_video.measure(stages[0], video, options.rounds)
            differ = max(each.apart for each in rounds)
            if differ > most_apart(options, video.size):
                sys.exit(f"no figures, for video or picture differ by {differ} when both are made at a time")
            step_ms = dit_video.medians(rounds)["step_ms"]
            console.print(f"[bold]a picture during a video[/bold]: {video.size}; a step takes {step_ms:.1f} ms")
            console.print(dit_video.table(rounds))
            report["video"] = dit_video.to_json(rounds) | {"size": str(video.size)}
    return report


def main() -> None:
    options = parse()
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of all processes on both sides
    threads = os.environ.get("OMP_NUM_THREADS", "torch's default")
    console.print(f"medians of {options.rounds} rounds, {options.requests} outputs each; threads of a side: {threads}")
    reports = []
    with tempfile.TemporaryDirectory(prefix="quartet-bench-") as scratch:
        for title in [options.model.name] if options.model else options.families:
            model = options.model or make_checkpoint(Path(scratch) / title, 0, options.tiny_size, title)
            reports.append(measure(title, model, options, Path(scratch)))
    if options.json:
        report = {"options": vars(options), "threads": threads, "checkpoints": reports}
        options.json.write_text(json.dumps(report, indent=1, default=str))


if __name__ == "__main__":
    main()
