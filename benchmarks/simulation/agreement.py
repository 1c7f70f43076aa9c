"""The simulation beside the real thing: 1 to 8 streams on this machine, measured as `make bench` does, and simulated.

Of the run with one stream the simulation gets the CPU time of a step of each stage, the way of the first sound, and how
much of the cores a step of thinker or talker uses that runs alone, so what it says of one stream is no prediction. Of
the run with the most streams it gets what each further answer adds to a step. All else it finds itself: who waits for
whom, which answers share a step, how many processes share the cores, and what comes of it.

Loads are short and take turns, in one order and then in the other: machines that others share are faster in one minute
than in the next.

    python -m benchmarks.simulation.agreement
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.table import Table

from benchmarks import speech
from benchmarks.simulation.calibration import FRAMES, TOKENS, Measured, costs_of
from benchmarks.simulation.closed_loop import Length
from benchmarks.simulation.decoder import pieces
from benchmarks.systems.holdings import scrape_of
from benchmarks.systems.processes import Groups, system_pids
from benchmarks.traffic.answer import Answer, Prompt
from benchmarks.traffic.client import Exchange, Gateway, Wish
from benchmarks.traffic.figures import Figures, first_audio_ms
from benchmarks.traffic.load import PROMPTS, closed_loop
from cli.scrape import MetricsDelta, Scrape

_STEPS = {"thinker": "step", "talker": "frame", "code2wav": "decode"}
_LIMIT = 0.15

console = Console(width=140, soft_wrap=True)


@dataclass
class Rounds:
    """What one number of streams came to: one entry of each round. `shared_by`: means of steps, by stage."""

    answers: list[list[Answer]] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)
    shared_by: list[dict[str, float]] = field(default_factory=list)

    def measured(self, streams: int) -> Measured:
        cpu_ms = {name: 1000 * statistics.median(self._cpu_s(name)) for name in _STEPS}
        with_clients = zip(
            self._cpu_s("gateway"), (each.client_cpu_s_per_request for each in self.figures), strict=True
        )
        cpu_ms["gateway"] = 1000 * statistics.median([gateway + client for gateway, client in with_clients])
        answers = [answer for each in self.answers for answer in each]
        figures = {
            "TTFA ms": statistics.median(first_audio_ms(answers)),
            "total ms": statistics.median(1000 * (answer.done_s - answer.sent_s) for answer in answers),
            "frames/s": sum(answer.frames for answer in answers) / sum(each.wall_s for each in self.figures),
        }
        shared_by = {stage: statistics.mean([each[stage] for each in self.shared_by]) for stage in _STEPS}
        prefill_ms = statistics.mean([each.stages["talker"]["prefill_ms"] for each in self.figures])
        return Measured(streams, [_lengths(each) for each in self.answers], figures, shared_by, cpu_ms, prefill_ms)

    def _cpu_s(self, process: str) -> list[float]:
        return [each.cpu_s_per_request[process] for each in self.figures]


async def measure(
    at: speech.Target, run_directory: Path, streams: list[int], options: argparse.Namespace
) -> list[Measured]:
    """Closed loops on a running system."""
    gateway, rounds = Gateway(at.url, Wish(TOKENS, FRAMES, 0.0, 0)), defaultdict[int, Rounds](Rounds)
    try:
        rate_hz = (await gateway.facts())["sample_rate_hz"]
        await closed_loop(gateway.send, max(streams), max(*streams, len(PROMPTS)))  # warm-up; does not count
        await _compile_a_grammar(at.url)
        for number in range(options.rounds):
            for count in streams if number % 2 else streams[::-1]:
                requests = min(options.requests, max(3 * count, len(PROMPTS)))
                console.print(f"round {number + 1}: {count} at a time, {requests} requests")
                before = {stage: scrape_of(run_directory, stage) for stage in _STEPS}
                load = closed_loop(gateway.send, count, requests)
                answers, figures = await speech.measured(at, rate_hz, load, Exchange.answer)
                rounds[count].answers.append(answers)
                rounds[count].figures.append(figures)
                rounds[count].shared_by.append(_shared_by(before, run_directory, _lengths(answers)))
    finally:
        await gateway.close()
    return [rounds[count].measured(count) for count in streams]


class _Structured(Wish):
    """Whose text has a grammar."""

    def body(self, model: str, prompt: Prompt) -> dict[str, Any]:
        schema = {"name": "answer", "schema": {"type": "object"}}
        return super().body(model, prompt) | {"response_format": {"type": "json_schema", "json_schema": schema}}


async def _compile_a_grammar(url: str) -> None:
    """The process that does it takes seconds of a core to start, by itself in a minute of the measurement."""
    gateway = Gateway(url, _Structured(TOKENS, FRAMES, 0.0, 0))
    try:
        await gateway.facts()
        if error := (await gateway.send(PROMPTS[0])).answer().error:
            raise RuntimeError(f"a grammar was not compiled: {error}")
    finally:
        await gateway.close()


def _lengths(answers: list[Answer]) -> list[Length]:
    return [(answer.tokens, answer.frames) for answer in answers]


def _shared_by(before: dict[str, Scrape], run_directory: Path, answers: list[Length]) -> dict[str, float]:
    found = dict[str, float]()
    for stage, call in _STEPS.items():
        of_load = MetricsDelta(before[stage], scrape_of(run_directory, stage))
        mean = of_load.mean("quartet_step_batch_size", call=call)
        if mean is None:
            raise RuntimeError(f"the {stage} has counted no steps")
        found[stage] = mean
    frames, decoded = sum(frames for _, frames in answers), sum(len(pieces(frames)) for _, frames in answers)
    return found | {"code2wav": found["code2wav"] * frames / decoded}


def compare(runs: list[Measured], cores: int) -> list[dict[str, Any]]:
    """A row for each figure of each load."""
    (costs, shared), rows = costs_of(runs[0], runs[-1], cores), list[dict[str, Any]]()
    for run in runs:
        simulated = run.simulated(costs, shared)
        for name, measured in run.figures.items():
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
    parser.add_argument("--rounds", type=int, default=12, help="of each load (12)")
    parser.add_argument("--requests", type=int, default=1000, help="most of a load; default: 3 a stream, at least 8")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    if len(options.streams) < 2 or min(options.streams) < 1 or sorted(set(options.streams)) != options.streams:
        parser.error("--streams: name two or more, the smallest first, each once")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # of simulated gateways
    with tempfile.TemporaryDirectory(prefix="quartet-agreement-") as scratch:
        run_directory = Path(scratch) / "run"
        with speech.started(speech.parse([]), run_directory, Path(scratch) / "tiny") as (url, model):
            at = speech.Target(url, model, Groups(system_pids(run_directory)))
            runs = asyncio.run(measure(at, run_directory, options.streams, options))
    rows = compare(runs, len(os.sched_getaffinity(0)))
    show(rows)
    if options.json:
        written = {"machine": speech.machine(), "rows": rows, "loads": [asdict(run) for run in runs]}
        options.json.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
