"""Talker or code2wav alone, at the sizes of Qwen3-Omni-30B-A3B with random weights: time per frame against the limit
that memory bandwidth sets.

The limit is the bytes of weights and state that a step has to read over the bandwidth of a copy, measured in the same
run. docs/benchmarks.md says what is counted.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.stages.code2wav import code2wav_stage
from benchmarks.stages.real_sizes import CODE2WAV, random_code2wav, random_talker
from benchmarks.stages.talker import talker_stage
from benchmarks.stages.timing import Stage, Timing, copy_bandwidth, measure, parameter_bytes
from benchmarks.stages.token2wav import measure_windows, windows_table
from services.common.engine.device import engine_device, prepared_device

FRAMES_PER_S = 12.5  # of one stream in real time
WINDOW_FRAMES = 96
console = Console(width=None if sys.stdout.isatty() else 120)


def stages(options: argparse.Namespace) -> Callable[[int], Stage]:
    """Makes the model once; returns what makes it ready for a batch size."""
    device, dtype = prepared_device(options.device), getattr(torch, options.dtype)
    began_s = time.perf_counter()
    if options.stage == "talker":
        model = talker = random_talker(device, dtype)
        make = lambda batch: talker_stage(talker, batch, options.context)  # noqa: E731
    else:
        model = decoder = random_code2wav(device, dtype)
        make = lambda batch: code2wav_stage(decoder, batch, options.frames)  # noqa: E731
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"{options.stage}: {count / 1e9:.2f} billion parameters, {parameter_bytes(model) / 1e9:.2f} GB in "
        f"{options.dtype} on {options.device}, made in {time.perf_counter() - began_s:.0f} s"
    )
    return make


def table(timings: list[Timing]) -> Table:
    """A row for each batch size."""
    shown = Table()
    times, amounts = ("step ms", "ms a frame", "limit ms", "times limit"), ("frames/s", "streams in\nreal time")
    for title in ("batch", *times, *amounts, "reads a step"):
        shown.add_column(title, justify="right")
    for timing in timings:
        shown.add_row(
            str(timing.batch),
            f"{timing.step_ms:.2f}",
            f"{timing.frame_ms:.2f}",
            f"{timing.limit_ms:.2f}",
            f"{timing.step_ms / timing.limit_ms:.1f}",
            f"{timing.frames_per_s:.1f}",
            f"{timing.frames_per_s / FRAMES_PER_S:.1f}",
            f"{timing.step_bytes / 1e9:.2f} GB, {timing.note}",
        )
    return shown


def report_windows(options: argparse.Namespace) -> None:
    """Prints, and writes if requested, the figures of a decoder whose limit is arithmetic."""
    timings = measure_windows(options)
    console.print(f"windows of {options.frames} codes of every stream a step, {options.dtype}")
    console.print(windows_table(timings))
    if options.json:
        report = {"options": vars(options), "timings": [asdict(t) for t in timings]}
        options.json.write_text(json.dumps(report, indent=1, default=str))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["talker", "code2wav"])
    parser.add_argument(
        "--family", default="qwen3_omni", choices=["qwen3_omni", "qwen2_5_omni"], help="code2wav: of which model"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=512, help="talker: cached positions of every stream")
    parser.add_argument(
        "--frames", type=int, help="code2wav: frames of every stream in a step; default: 1, of qwen2_5_omni 96"
    )
    parser.add_argument(
        "--evaluations",
        type=int,
        choices=(4, 12, 36),
        help="qwen2_5_omni: of the transformer in a step that is timed, of its 36; what the others take is computed",
    )
    parser.add_argument("--steps", type=int, default=100, help="most steps that are timed")
    parser.add_argument("--seconds", type=float, default=10.0, help="a batch size is timed no longer, but 3 steps")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of a step")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.family == "qwen2_5_omni":
        if options.stage != "code2wav":
            parser.error("--family qwen2_5_omni is for code2wav")
        options.frames = options.frames or WINDOW_FRAMES
        report_windows(options)
        return
    options.frames = options.frames or 1
    device = engine_device(options.device)
    bytes_per_s = copy_bandwidth(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{options.threads} CPU threads"
    console.print(f"{name}: a copy reads and writes {bytes_per_s / 1e9:.1f} GB a second")
    make = stages(options)
    timings = []
    for batch in options.batch:
        with torch.inference_mode():
            timings.append(measure(make(batch), batch, options.steps, options.seconds, bytes_per_s))
        console.print(f"batch {batch}: {timings[-1].step_ms:.2f} ms a step")
    if options.stage == "talker":
        what = f"one step is one frame of every stream, {options.context} cached positions each"
    else:
        what = f"codec frames of every stream a step: {options.frames}, {CODE2WAV.samples_per_frame} samples each"
    console.print(f"{options.stage}, {options.dtype}, {name}; {what}")
    console.print(table(timings))
    if options.json:
        report = {"options": vars(options), "device": name, "copy_bytes_per_s": bytes_per_s}
        options.json.write_text(json.dumps(report | {"timings": [asdict(t) for t in timings]}, indent=1, default=str))


if __name__ == "__main__":
    main()
