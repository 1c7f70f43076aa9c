"""What the gateway costs: CPU time of a streamed answer and of an open microphone, and TTFT as arrivals come faster.

The stages follow a timetable (systems/scripted.py), so that what is measured is the gateway. It has one core to itself;
the stages and the clients have the others. With `--against REVISION` a gateway of that revision is measured beside, in
turns, before the same stages, and each figure is followed by its ratio: the median of the rounds' ratios, and its
standard error. Many short rounds are more exact than few long ones. `--flag` is for this side's gateway.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.conversations.microphone import call
from benchmarks.conversations.utterances import RATE_HZ
from benchmarks.systems import scripted
from benchmarks.systems.gateways import GatewayProcess, gateway
from benchmarks.systems.processes import Groups
from benchmarks.traffic.load import open_loop, poisson_arrivals
from benchmarks.traffic.raw_streams import Stream, stream
from cli.plan import PIPELINE

_ROOT = Path(__file__).resolve().parents[1]
_START_S = 8.0  # after which a gateway has started all of its processes
_FIRST_TEXT = scripted.WORD.strip().encode()
console = Console()


@dataclass
class Side:
    """One gateway, and what was measured of it.

    Attributes:
        name: for the table.
        process: the gateway.
        figures: by name, a value of each round.
    """

    name: str
    process: GatewayProcess
    figures: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Adds a round's value."""
        self.figures.setdefault(name, []).append(value)

    def cpu_s(self) -> float:
        """CPU time it has used so far, its workers' included."""
        return Groups({"gateway": self.process.pid}).cpu_s()["gateway"]


@contextlib.contextmanager
def scripted_stages(flags: argparse.Namespace, cores: set[int]) -> Iterator[dict[str, str]]:
    """Addresses of stages that run around a block, on `cores`."""
    command = [sys.executable, "-m", scripted.__name__, *scripted.flags_of(flags)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        os.sched_setaffinity(process.pid, cores)
        assert process.stdin is not None
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()


@contextlib.contextmanager
def revision(name: str, directory: Path) -> Iterator[Path]:
    """The sources of the revision `name`, in `directory` around a block, with their protos compiled."""
    git = ["git", "-C", str(_ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(directory), name], check=True)
    try:
        subprocess.run([sys.executable, str(directory / "protos/generate.py")], cwd=directory, check=True)
        yield directory
    finally:
        subprocess.run([*git, "remove", "--force", str(directory)], check=True)


async def ask(side: Side, speech: bool) -> Stream:
    """One streamed answer. Exits if it was not complete."""
    body = {"model": scripted.MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    if speech:
        body |= {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
    at = urlsplit(side.process.url)
    answer = await stream(
        at.hostname or "", at.port or 0, "/v1/chat/completions", json.dumps(body).encode(), _FIRST_TEXT
    )
    if not answer.complete:
        sys.exit(f"{side.name}: an answer broke off: {answer.tail.decode(errors='replace')}")
    return answer


async def cost_of_streams(side: Side, flags: argparse.Namespace, idle: float, speech: bool) -> None:
    """CPU of an answer, `--concurrency` at a time; `idle`: what the gateway uses a second without any."""
    left = iter(range(flags.requests))

    async def work() -> None:
        for _ in left:
            await ask(side, speech)

    cpu_s, began_s = side.cpu_s(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(flags.concurrency)))
    took_s = time.perf_counter() - began_s
    used_s = max(side.cpu_s() - cpu_s - idle * took_s, 0.0)
    what = "spoken answer" if speech else "text answer"
    side.add(f"CPU ms a {what}", 1000 * used_s / flags.requests)
    if speech:
        side.add("such streams at a time, a core", flags.concurrency * took_s / max(used_s, 0.001))


async def cost_of_microphones(side: Side, flags: argparse.Namespace, idle: float) -> None:
    """CPU of a realtime session that listens to a room, a second."""
    async with contextlib.AsyncExitStack() as stack:
        callers = [
            await stack.enter_async_context(call(side.process.url, flags.append_ms / 1000))
            for _ in range(flags.microphones)
        ]
        samples = round((flags.microphone_s + 5) * RATE_HZ)
        room = np.random.default_rng(0).integers(-50, 50, samples, np.int16)
        for caller in callers:
            caller.say(room)
        await asyncio.sleep(1)  # the detector has started
        cpu_s, began_s = side.cpu_s(), time.perf_counter()
        await asyncio.sleep(flags.microphone_s)
        took_s = time.perf_counter() - began_s
        used_s = side.cpu_s() - cpu_s - idle * took_s
    side.add("CPU ms a second of an open microphone", 1000 * used_s / flags.microphones / took_s)


async def ttft_at(side: Side, rate_per_s: float, flags: argparse.Namespace) -> None:
    """TTFT of spoken answers at a rate of requests."""
    arrivals = poisson_arrivals(rate_per_s, round(rate_per_s * flags.rate_s), seed=1)
    answers = await open_loop(lambda _: ask(side, speech=True), arrivals)
    ttft_ms = [1000 * answer.ttft_s for answer in answers if answer.ttft_s is not None]
    cuts = statistics.quantiles(ttft_ms, n=20)
    side.add(f"TTFT ms p50, {rate_per_s:g} arrivals/s", cuts[9])
    side.add(f"TTFT ms p95, {rate_per_s:g} arrivals/s", cuts[18])


async def measure(sides: list[Side], flags: argparse.Namespace) -> None:
    """All figures of all sides, in turns."""
    for side in sides:  # warms up
        await asyncio.gather(*(ask(side, speech=True) for _ in range(8)))
    await asyncio.sleep(_START_S)
    for number in range(flags.rounds):
        console.print(f"round {number + 1} of {flags.rounds} ...")
        order = sides if number % 2 else sides[::-1]
        idle = {}
        for side in order:
            cpu_s = side.cpu_s()
            await asyncio.sleep(flags.idle_s)
            idle[side.name] = (side.cpu_s() - cpu_s) / flags.idle_s
            side.add("CPU ms a second, idle", 1000 * idle[side.name])
        for speech in (True, False):
            for side in order:
                await cost_of_streams(side, flags, idle[side.name], speech)
        for side in order if flags.microphones else ():
            await cost_of_microphones(side, flags, idle[side.name])
        for rate_per_s in flags.rate:
            for side in order:
                await ttft_at(side, rate_per_s, flags)


def report(sides: list[Side]) -> Table:
    """A row for each figure: the median of the rounds, their range, and the ratio to the last side."""
    table = Table("figure", *(side.name for side in sides), *(["ratio"] if len(sides) > 1 else []))
    for name in sides[0].figures:
        cells = []
        for side in sides:
            values = side.figures[name]
            cells.append(f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})")
        if len(sides) > 1:
            rounds = zip(*(side.figures[name] for side in sides), strict=True)
            ratios = [ours / theirs for ours, theirs in rounds if theirs]
            cells.append(_with_error(ratios) if ratios else "")
        table.add_row(name, *cells)
    return table


def _with_error(ratios: list[float]) -> str:
    """Their median and its standard error, as of values that are normally distributed."""
    if len(ratios) < 2:
        return f"{ratios[0]:.3f}"
    error = math.sqrt(math.pi / 2) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return f"{statistics.median(ratios):.3f} +- {error:.3f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scripted.add_flags(parser)
    parser.add_argument("--against", metavar="REVISION", help="of this repository, to measure beside")
    parser.add_argument("--flag", action="append", default=[], help="of this side's gateway, e.g. --workers=2")
    parser.add_argument("--cores", type=int, default=1, help="of the gateway; the others are the stages' and clients'")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48, help="answers of a round")
    parser.add_argument("--concurrency", type=int, default=16, help="answers at a time")
    parser.add_argument("--idle-s", type=float, default=4.0, help="how long an idle gateway is looked at")
    parser.add_argument("--microphones", type=int, default=8, help="sessions at a time; 0: they are not measured")
    parser.add_argument("--microphone-s", type=float, default=8.0, help="how long each listens")
    parser.add_argument("--append-ms", type=float, default=40.0, help="sound of one event")
    parser.add_argument("--rate", type=float, action="append", help="arrivals a second; may be repeated; 0: none")
    parser.add_argument("--rate-s", type=float, default=5.0, help="how long they arrive")
    flags = parser.parse_args()
    flags.rate = [rate for rate in flags.rate or (10.0, 20.0, 40.0, 60.0) if rate]
    every = sorted(os.sched_getaffinity(0))
    own, others = set(every[: flags.cores]), set(every[flags.cores :]) or set(every)
    os.sched_setaffinity(0, others)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quartet-bench-")))
        addresses = stack.enter_context(scripted_stages(flags, others))

        def side(name: str, sources: Path | None, more: list[str]) -> Side:
            log = scratch / f"{name.replace('/', '-')}.log"
            settings = ["--max-running-requests=100000", "--health-timeout-s=30", *more]
            process = stack.enter_context(gateway(addresses, PIPELINE, log, *settings, sources=sources))
            Groups({name: process.pid}).pin(own)
            return Side(name, process)

        sides = [side("now", None, flags.flag)]
        if flags.against is not None:
            sources = stack.enter_context(revision(flags.against, scratch / "revision"))
            sides.append(side(flags.against, sources, []))
        asyncio.run(measure(sides, flags))
    console.print(report(sides))


if __name__ == "__main__":
    main()
