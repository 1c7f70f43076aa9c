"""What splitting costs: the same engines as three services over gRPC, and in one process that passes rows in memory.

Same machine, same requests, same thread settings, no HTTP on either side; both must say the same. Both systems are up
at the same time and take turns, load by load, so that what the machine does otherwise hits both alike. Prints TTFA,
audio seconds a second and CPU seconds a request, and the ratio split / fused. docs/benchmarks.md says more.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.systems.processes import Groups, system_pids
from benchmarks.traffic.answer import Answer
from benchmarks.traffic.figures import Figures, figures
from benchmarks.traffic.load import PROMPTS, closed_loop
from cli.plan import PIPELINE, LaunchOptions
from cli.supervisor import free_ports
from cli.tiny import make_checkpoint
from cli.up import running

LOG_TAIL_CHARACTERS = 4000
SETTLE_S = 2.0  # so that neither side's last step runs into the other's turn
MOST_PCM16_STEPS_APART = 2  # a batch of another size may round a sample otherwise
# Title, and where its value is in Figures; p50 of a spread.
ROWS = {"ttft_ms": "TTFT ms", "ttfa_ms": "TTFA ms", "total_ms": "total ms"}

console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True)
class Command:
    """A load for one side."""

    concurrency: int
    requests: int
    tokens: int
    frames: int


def serve(side: str, model: str, addresses: dict[str, str], log_file: Path, pipe: Connection) -> None:
    """The process of one side: says the sample rate, then runs loads as they come through `pipe`, until it is closed.
    What it and its children print goes to `log_file`."""
    import uvloop

    with log_file.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.setpgid(0, 0)  # so that its children can be told from the other side's
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if side == "fused" and openmp.exists():
        os.environ["LD_PRELOAD"] = str(openmp)  # for vLLM's engine core, as `quartet up` does; not for this process
    uvloop.run(_serve(side, model, addresses, pipe))


async def _serve(side: str, model: str, addresses: dict[str, str], pipe: Connection) -> None:
    if side == "fused":
        from benchmarks.fusion.fused import Fused

        system = await Fused.start(model)
    else:
        from benchmarks.fusion.split import Split

        system = await Split.start(addresses)
    pipe.send(system.sample_rate_hz)
    try:
        with contextlib.suppress(EOFError):
            while True:
                command: Command = await asyncio.to_thread(pipe.recv)

                async def send(prompt: str, command: Command = command) -> tuple[Answer, bytes]:
                    return await system.answer(prompt, command.tokens, command.frames)

                pipe.send(await closed_loop(send, command.concurrency, command.requests))
    finally:
        await system.close()  # else the process would wait for its engine's, and its other end for ever


class Side:
    """One of the two systems, in a process of its own."""

    def __init__(
        self, name: str, model: Path, scratch: Path, addresses: dict[str, str], services: dict[str, int]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._log_file = scratch / f"{name}.log"
        self._sample_rate_hz = 0
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(name, str(model), addresses, self._log_file, theirs))
        self._process.start()
        theirs.close()
        assert self._process.pid
        self._groups = Groups(services | {name: self._process.pid})

    def wait_until_ready(self) -> None:
        """Blocks until it serves. Here and in `run`, the program ends with the end of its log if it ended instead."""
        self._sample_rate_hz = self._receive()

    def run(self, command: Command) -> tuple[list[Answer], list[bytes], Figures]:
        """Runs a load: its answers, their samples, and what it came to."""
        before_s = self._groups.cpu_s()
        self._pipe.send(command)
        results: list[tuple[Answer, bytes]] = self._receive()
        after_s = self._groups.cpu_s()
        answers = [answer for answer, _ in results]
        result = figures(answers, self._sample_rate_hz)
        result.cpu_s_per_request = {name: (after_s[name] - before_s[name]) / len(answers) for name in after_s}
        return answers, [pcm16 for _, pcm16 in results], result

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            sys.exit(f"{self.name} ended:\n{self._log_file.read_text(errors='replace')[-LOG_TAIL_CHARACTERS:]}")

    def close(self) -> None:
        """Ends it."""
        self._pipe.close()
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def both(model: Path, scratch: Path, run_directory: Path | None) -> Iterator[tuple[Side, Side]]:
    """The split system, started unless it runs in `run_directory`, and the fused one; both ready."""
    if run_directory:
        with _sides(model, scratch, run_directory) as sides:
            yield sides
        return
    run_directory = scratch / "run"
    options = LaunchOptions(str(model), "127.0.0.1", free_ports(1)[0], PIPELINE, run_directory)
    with running(options), _sides(model, scratch, run_directory) as sides:
        yield sides


@contextlib.contextmanager
def _sides(model: Path, scratch: Path, run_directory: Path) -> Iterator[tuple[Side, Side]]:
    state = json.loads((run_directory / "state.json").read_text())["processes"]
    addresses = {name: process["address"] for name, process in state.items() if name != "gateway"}
    services = {name: pid for name, pid in system_pids(run_directory).items() if name != "gateway"}
    split = Side("split", model, scratch, addresses, services)
    fused = Side("fused", model, scratch, {}, {})
    try:
        split.wait_until_ready()
        fused.wait_until_ready()
        yield split, fused
    finally:
        fused.close()
        split.close()


def require_same(ours: list[Answer], theirs: list[Answer]) -> None:
    """Ends the program unless both sides said the same."""
    for our, their in zip(ours, theirs, strict=True):
        if our.said != their.said:
            sys.exit(f"no figures, for the two sides did not say the same:\n{our.said}\n{their.said}")


def require_same_sound(ours: list[bytes], theirs: list[bytes]) -> int:
    """Most steps of PCM16 by which a sample differs; ends the program when that is audible."""
    apart = 0
    for our, their in zip(ours, theirs, strict=True):
        difference = np.frombuffer(our, np.int16).astype(int) - np.frombuffer(their, np.int16)
        apart = max(apart, int(np.abs(difference).max(initial=0)))
    if apart > MOST_PCM16_STEPS_APART:
        sys.exit(f"no figures, for the two sides' samples are {apart} steps of PCM16 apart")
    return apart


def compare(sides: tuple[Side, Side], options: argparse.Namespace) -> dict[int, dict[str, list[Figures]]]:
    """Figures of every round, by concurrency and side."""
    warm_up = Command(len(PROMPTS), len(PROMPTS), options.tokens, options.frames)
    (ours, our_sound, _), (theirs, their_sound, _) = (side.run(warm_up) for side in sides)
    require_same(ours, theirs)
    apart = require_same_sound(our_sound, their_sound)
    console.print(f"both said the same {len(ours)} answers; their samples are at most {apart} steps of PCM16 apart")
    results: dict[int, dict[str, list[Figures]]] = {}
    for concurrency in options.concurrency:
        requests = options.requests or max(4 * concurrency, 2 * len(PROMPTS))
        command = Command(concurrency, requests, options.tokens, options.frames)
        by_side = results[concurrency] = {side.name: [] for side in sides}
        for number in range(options.rounds):
            answers = {}
            for side in sides if number % 2 == 0 else reversed(sides):
                time.sleep(SETTLE_S)
                answers[side.name], _, result = side.run(command)
                by_side[side.name].append(result)
                console.print(
                    f"{concurrency} at a time, round {number + 1}, {side.name}: {result.audio_s_per_s:.2f} audio s/s"
                )
            require_same(*answers.values())
    return results


def values(rounds: list[Figures]) -> dict[str, float]:
    """The figures that are compared: medians over rounds."""
    spreads = {title: median(each.spreads[name]["p50"] for each in rounds) for name, title in ROWS.items()}
    cpu_s = median(each.cpu_s or 0.0 for each in rounds)
    return spreads | {"audio s/s": median(each.audio_s_per_s for each in rounds), "CPU s a request": cpu_s}


def table(results: dict[int, dict[str, list[Figures]]]) -> Table:
    """Both sides, and the ratio."""
    shown = Table()
    for title in ("at a time", "figure", "split", "fused", "split / fused"):
        shown.add_column(title, justify="left" if title == "figure" else "right")
    for concurrency, by_side in results.items():
        split, fused = values(by_side["split"]), values(by_side["fused"])
        for title in split:
            ratio = f"{split[title] / fused[title]:.3f}" if fused[title] else ""
            shown.add_row(str(concurrency), title, f"{split[title]:.2f}", f"{fused[title]:.2f}", ratio)
        shown.add_section()
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint directory; default: a new `quartet tiny` one")
    parser.add_argument("--run-dir", type=Path, help="of a `quartet up` of --model; default: starts one")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, help="of a load; default: 4 a worker, at least 16")
    parser.add_argument("--rounds", type=int, default=3, help="times each load is repeated on each side")
    parser.add_argument("--tokens", type=int, default=40, help="most text tokens a request")
    parser.add_argument("--frames", type=int, default=60, help="most codec frames a request")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="of OpenMP, an engine")
    parser.add_argument("--json", type=Path, help="write the figures of every round here")
    options = parser.parse_args()
    if options.run_dir and not options.model:
        parser.error("--run-dir: needs --model, the checkpoint that it serves")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of all processes on both sides
    with tempfile.TemporaryDirectory(prefix="quartet-bench-") as scratch:
        model = options.model or make_checkpoint(Path(scratch) / "tiny", seed=0, size="tiny")
        with both(model, Path(scratch), options.run_dir) as sides:
            results = compare(sides, options)
    console.print(f"p50 of requests, medians of {options.rounds} rounds; OMP_NUM_THREADS={options.threads} everywhere")
    console.print(table(results))
    if options.json:
        figures_json: dict[str, Any] = {
            str(concurrency): {side: [each.to_json() for each in rounds] for side, rounds in by_side.items()}
            for concurrency, by_side in results.items()
        }
        options.json.write_text(json.dumps(figures_json, indent=1))


if __name__ == "__main__":
    main()
