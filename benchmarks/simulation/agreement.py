"""The simulation beside the real thing: 1 to 8 streams on this machine, measured as `make bench` does, and simulated.

Of the run with one stream the simulation gets what a step of each stage, a stage's first output and the ways between
take; of the run with the most streams, how much longer each further stream makes a step. All else it finds itself:
who waits for whom, which answers share a step, and what comes of it.

    python -m benchmarks.simulation.agreement
"""

import argparse
import asyncio
import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.table import Table

from benchmarks import speech
from benchmarks.simulation.closed_loop import Length, simulate
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.decoder import pieces
from benchmarks.simulation.gpus import Gpu
from benchmarks.systems.holdings import scrape_of
from benchmarks.systems.processes import Groups, system_pids
from benchmarks.traffic.client import Exchange, Gateway, Wish
from benchmarks.traffic.figures import Figures
from benchmarks.traffic.load import PROMPTS, closed_loop
from cli.scrape import MetricsDelta, Scrape

TOKENS, FRAMES = 40, 60  # most of an answer, as of `make bench`
PROMPT_TOKENS = 20.0  # about; they are in the thinker's cache
_STEPS = {"thinker": "step", "talker": "frame", "code2wav": "decode"}
_LIMIT = 0.15

console = Console(width=140, soft_wrap=True)


@dataclass(frozen=True)
class Step:
    """The mean of a stage's steps in a load.

    Attributes:
        ms: that it took.
        size: answers that shared it; of code2wav, codec frames.
    """

    ms: float
    size: float


@dataclass(frozen=True)
class Measured:
    """A load on the real system."""

    streams: int
    answers: list[Length]
    figures: Figures
    steps: dict[str, Step]

    def values(self) -> dict[str, float]:
        """As `simulate` has them."""
        spreads = self.figures.spreads
        return {
            "TTFA ms": spreads["ttfa_ms"]["p50"],
            "total ms": spreads["total_ms"]["p50"],
            "frames/s": self.figures.frames_per_s,
        }


def costs_of(one: Measured, most: Measured) -> Costs:
    """Constants of this machine, by its runs with one stream and with the most.

    They are those of a GPU that reads a gigabyte in a millisecond: a "gigabyte" is a millisecond here.
    """
    base = Costs().with_values(question_s=0, text_tokens=PROMPT_TOKENS)
    launch, more = dict[str, float](), dict[str, float]()
    for stage in _STEPS:
        few, many = one.steps[stage], most.steps[stage]
        more[stage] = max(0.0, (many.ms - few.ms) / (many.size - few.size)) if many.size > few.size else 0.0
        launch[stage] = few.ms - more[stage] * few.size
    first = {stage: one.figures.stages[stage]["first_output_ms"] for stage in _STEPS}
    thinker_prompt_ms = max(0.0, first["thinker"] - one.steps["thinker"].ms)
    talker_prompt_ms = max(0.0, first["talker"] - one.steps["talker"].ms)
    first_decode_ms = launch["code2wav"] + more["code2wav"]
    of_stages = base.request_ms + first["thinker"] + first["talker"] + first_decode_ms + base.piece_ms
    return base.with_values(
        way_ms=max(0.0, (one.values()["TTFA ms"] - of_stages) / 4),  # to the thinker, talker, code2wav, and back
        states_ms=0,
        tokenizer_ms=thinker_prompt_ms / PROMPT_TOKENS,
        prefill_ms=0,
        thinker_launch_ms=launch["thinker"],
        thinker_dense_gb=0,
        thinker_experts_gb=0,
        context_gb=more["thinker"] / (PROMPT_TOKENS + TOKENS),
        talker_launch_ms=launch["talker"],
        talker_dense_gb=0,
        talker_experts_gb=0,
        talker_context_gb=more["talker"] / (PROMPT_TOKENS + FRAMES / 2),
        talker_prefill_ms=talker_prompt_ms,
        decoder_launch_ms=launch["code2wav"],
        decoder_frame_gb=more["code2wav"],
    )


async def measure(at: speech.Target, run_directory: Path, streams: list[int], most_requests: int) -> list[Measured]:
    """Closed loops on a running system."""
    gateway, found = Gateway(at.url, Wish(TOKENS, FRAMES, 0.0, 0)), list[Measured]()
    try:
        rate_hz = (await gateway.facts())["sample_rate_hz"]
        for count in streams:
            requests = min(most_requests, max(12 * count, 2 * len(PROMPTS)))
            console.print(f"{count} at a time, {requests} requests")
            await closed_loop(gateway.send, count, max(count, len(PROMPTS)))  # warm-up; does not count
            before = {stage: scrape_of(run_directory, stage) for stage in _STEPS}
            load = closed_loop(gateway.send, count, requests)
            answers, figures = await speech.measured(at, rate_hz, load, Exchange.answer)
            lengths = [(answer.tokens, answer.frames) for answer in answers]
            steps = {
                stage: _mean_step(stage, before[stage], scrape_of(run_directory, stage), lengths) for stage in _STEPS
            }
            found.append(Measured(count, lengths, figures, steps))
    finally:
        await gateway.close()
    return found


def _mean_step(stage: str, before: Scrape, after: Scrape, answers: list[Length]) -> Step:
    of_load, call = MetricsDelta(before, after), _STEPS[stage]
    seconds = of_load.mean("quartet_step_seconds", call=call)
    shared_by = of_load.mean("quartet_step_batch_size", call=call)
    if seconds is None or shared_by is None:
        raise RuntimeError(f"the {stage} has counted no steps")
    if stage == "code2wav":
        shared_by *= sum(frames for _, frames in answers) / sum(len(pieces(frames)) for _, frames in answers)
    return Step(1000 * seconds, shared_by)


def compare(runs: list[Measured]) -> list[dict[str, Any]]:
    """A row for each figure of each load."""
    gpu = Gpu("this machine", 1.0, 10**6, 256)
    costs, rows = costs_of(runs[0], runs[-1]), list[dict[str, Any]]()
    for run in runs:
        simulated = simulate(costs, gpu, run.streams, run.answers)
        for name, measured in run.values().items():
            row = {"streams": run.streams, "figure": name, "measured": measured, "simulated": simulated[name]}
            rows.append(row | {"difference": simulated[name] / measured - 1})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("at a time", "figure", "measured", "simulated", "difference")
    for row in rows:
        values = (f"{row[name]:.1f}" for name in ("measured", "simulated"))
        table.add_row(str(row["streams"]), row["figure"], *values, f"{row['difference']:+.0%}")
    console.print(table)
    worst = max(rows, key=lambda row: abs(row["difference"]))
    within = sum(abs(row["difference"]) <= _LIMIT for row in rows)
    console.print(
        f"{within} of {len(rows)} figures within {_LIMIT:.0%}; the worst: {worst['figure']} of {worst['streams']} "
        f"at a time, {worst['difference']:+.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8], help="requests at a time (1 2 4 8)")
    parser.add_argument("--requests", type=int, default=1000, help="most of a load; default: 12 a stream, at least 16")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    if len(options.streams) < 2 or min(options.streams) < 1 or sorted(set(options.streams)) != options.streams:
        parser.error("--streams: name two or more, the smallest first, each once")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # of simulated gateways
    with tempfile.TemporaryDirectory(prefix="quartet-agreement-") as scratch:
        run_directory = Path(scratch) / "run"
        with speech.started(speech.parse([]), run_directory, Path(scratch) / "tiny") as (url, model):
            at = speech.Target(url, model, Groups(system_pids(run_directory)))
            runs = asyncio.run(measure(at, run_directory, options.streams, options.requests))
    rows = compare(runs)
    show(rows)
    if options.json:
        steps = [{"streams": run.streams, **{stage: vars(step) for stage, step in run.steps.items()}} for run in runs]
        options.json.write_text(json.dumps({"machine": speech.machine(), "rows": rows, "steps": steps}, indent=1))


if __name__ == "__main__":
    main()
