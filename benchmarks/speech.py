"""Speech under load: Quartet's gateway beside transformers' `generate` on the same weights, in one run (`make bench`).

Closed loops at given concurrencies, then an open loop with Poisson arrivals at a share of the capacity that the closed
loops showed. Prints TTFT, TTFA, ITL, total time, RTF, playback gaps, audio seconds a second, CPU time and where a
request's time went. docs/benchmarks.md defines every figure.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.peers import chat
from benchmarks.systems.processes import Groups, system_pids
from benchmarks.traffic.answer import Answer
from benchmarks.traffic.client import Exchange, Gateway, Request, Wish
from benchmarks.traffic.figures import Figures, figures, first_audio_ms, longest_gaps_ms
from benchmarks.traffic.load import PROMPTS, closed_loop, open_loop, poisson_arrivals
from benchmarks.traffic.picture import draw
from benchmarks.traffic.report import VLLM_OMNI, Load, show
from cli.plan import PIPELINE, LaunchError, LaunchOptions
from cli.supervisor import free_ports
from cli.tiny import make_checkpoint
from cli.up import running
from services.common.engine.process import freeze_heap

STAGES = ("thinker", "talker", "code2wav", "gateway")
Read = Callable[[Exchange], Answer]  # what an exchange came to
RECORDED = ("qwen3-omni", 40, 60)  # family, tokens and frames of the load that VLLM_OMNI's figures are of
MIB = 1024 * 1024

console = Console(width=None if sys.stdout.isatty() else 140)


@dataclass
class Target:
    """A system under load. `processes` is None where they cannot be seen, `model` where it is not known."""

    url: str
    model: Path | None
    processes: Groups | None


@dataclass
class Run:
    """A load with all its answers."""

    load: Load
    answers: list[Answer]
    peer_answers: list[Answer]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="of a running gateway; CPU time and memory are left out")
    where.add_argument("--run-dir", type=Path, help="of a `quartet up` on this machine; default: starts a system")
    parser.add_argument(
        "--model", type=Path, help="checkpoint directory to start, and for transformers; default: a new `quartet tiny`"
    )
    parser.add_argument("--arch", default="qwen3-omni", help="of that `quartet tiny`: qwen3-omni or qwen2.5-omni")
    parser.add_argument("--flag", action="append", default=[], metavar="STAGE.SETTING=VALUE", help="may be repeated")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8], help="of the closed loops (1 8)")
    parser.add_argument("--requests", type=int, help="of each closed loop; default: 12 a worker, at least 16")
    parser.add_argument("--load", type=float, default=0.8, help="of the open loop: a share of the capacity; 0: none")
    parser.add_argument("--rate", type=float, help="of the open loop: requests a second, instead of --load")
    parser.add_argument("--arrivals", type=int, default=60, help="requests of the open loop")
    parser.add_argument("--tokens", type=int, default=40, help="most text tokens a request")
    parser.add_argument("--frames", type=int, default=60, help="most codec frames a request")
    parser.add_argument("--temperature", type=float, default=0.0, help="of text and speech; transformers needs 0")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of the arrivals")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--peer-requests", type=int, default=16, help="requests that count of transformers")
    parser.add_argument("--peer-threads", type=int, default=os.cpu_count(), help="its OpenMP threads (all cores)")
    parser.add_argument("--json", type=Path, help="write all figures and every request here")
    parser.add_argument("--picture", type=Path, help="draw them here (PNG or SVG; needs the extra `bench`)")
    options = parser.parse_args(arguments)
    if not options.concurrency and not options.rate:
        parser.error("--concurrency: name one, or give --rate")
    if min(options.concurrency, default=1) < 1:
        parser.error("--concurrency: must be 1 or more")
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        parser.error("--picture: matplotlib is missing; pip install -e '.[bench]'")
    return options


def stage_arguments(flags: Sequence[str]) -> dict[str, list[str]]:
    """Command lines by stage from `stage.setting=value`.

    Raises:
        SystemExit: a flag of another form, or of no stage.
    """
    arguments: dict[str, list[str]] = {}
    for flag in flags:
        name, equals, value = flag.partition("=")
        stage, dot, setting = name.partition(".")
        if not (equals and dot and stage in STAGES):
            sys.exit(f"--flag {flag}: must be STAGE.SETTING=VALUE, with one of {', '.join(STAGES)}")
        arguments.setdefault(stage, []).append(f"--{setting.replace('_', '-')}={value}")
    return arguments


@contextlib.contextmanager
def target(
    options: argparse.Namespace, scratch: Path, pipeline: Path = PIPELINE, arch: str = "qwen3-omni"
) -> Iterator[Target]:
    """The system to load; it is started, and stopped again, unless one was named."""
    if options.url:
        yield Target(options.url, options.model, None)
    elif options.run_dir:
        state = json.loads((options.run_dir / "state.json").read_text())
        yield Target(state["url"], options.model, Groups(system_pids(options.run_dir)))
    else:
        with started(options, scratch / "run", scratch / "tiny", pipeline, arch) as (url, model):
            yield Target(url, model, Groups(system_pids(scratch / "run")))


@contextlib.contextmanager
def started(
    options: argparse.Namespace, run_directory: Path, tiny: Path, pipeline: Path = PIPELINE, arch: str = "qwen3-omni"
) -> Iterator[tuple[str, Path]]:
    """A new system: its gateway's URL, and its checkpoint, which is made at `tiny` if the options name none."""
    model = options.model or make_checkpoint(tiny, seed=0, size="tiny", arch=arch)
    flags, begun_s = stage_arguments(options.flag), time.monotonic()
    with running(LaunchOptions(str(model), "127.0.0.1", free_ports(1)[0], pipeline, run_directory, flags)) as stack:
        console.print(f"ready after {time.monotonic() - begun_s:.0f} s")
        yield stack.url, model


async def load_gateway(
    at: Target, options: argparse.Namespace, wish: Request, read: Read = Exchange.answer
) -> tuple[list[Run], dict[str, Any]]:
    """All loads on the gateway, and its facts."""
    gateway = Gateway(at.url, wish)
    runs: list[Run] = []
    try:
        facts = await gateway.facts()
        rate_hz = facts["sample_rate_hz"]
        for concurrency in options.concurrency:
            requests = options.requests or max(12 * concurrency, 2 * len(PROMPTS))
            console.print(f"closed loop: {concurrency} at a time, {requests} requests")
            await closed_loop(gateway.send, concurrency, max(concurrency, len(PROMPTS)))  # warm-up; does not count
            answers, result = await measured(at, rate_hz, closed_loop(gateway.send, concurrency, requests), read)
            title = f"closed loop, {concurrency} at a time, {requests} requests"
            runs.append(Run(Load(title, concurrency, None, result), answers, []))
        capacity_per_s = max((run.load.quartet.requests_per_s for run in runs), default=0.0)
        if rate_per_s := options.rate or options.load * capacity_per_s:
            arrivals_s = poisson_arrivals(rate_per_s, options.arrivals, options.seed)
            share = f" = {options.load:.0%} of capacity" if not options.rate else ""
            title = f"open loop, {options.arrivals} Poisson arrivals at {rate_per_s:.2f} a second{share}"
            console.print(title)
            answers, result = await measured(at, rate_hz, open_loop(gateway.send, arrivals_s), read)
            runs.append(Run(Load(title, None, rate_per_s, result), answers, []))
    finally:
        await gateway.close()
    return runs, facts


async def measured(
    at: Target, rate_hz: int, loop: Awaitable[list[Exchange]], read: Read
) -> tuple[list[Answer], Figures]:
    """Runs a load and takes the CPU time of the system before and after."""
    freeze_heap()  # a full collection in this process would look like a stall of the system
    before_s = at.processes.cpu_s() if at.processes else {}
    client_before_s = time.process_time()
    exchanges = await loop
    client_s = time.process_time() - client_before_s
    after_s = at.processes.cpu_s() if at.processes else {}
    answers = [read(exchange) for exchange in exchanges]
    try:
        result = figures(answers, rate_hz)
    except ValueError as error:
        sys.exit(f"no figures: {error}")
    result.cpu_s_per_request = {name: (after_s[name] - before_s[name]) / len(answers) for name in after_s}
    result.client_cpu_s_per_request = client_s / len(answers)
    if at.processes:
        result.memory_mib = {name: size / MIB for name, size in at.processes.memory_bytes().items()}
    return answers, result


def ask_peer(model: Path, runs: Sequence[Run], options: argparse.Namespace, rate_hz: int) -> None:
    """Has transformers answer the same, and adds its figures to the closed loops."""
    closed = [run for run in runs if run.load.concurrency]
    most = max(run.load.concurrency or 1 for run in closed)
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(most + options.peer_requests)]
    console.print(f"transformers, {len(prompts)} requests one after another on {options.peer_threads} threads")
    answers, cpu_s = chat.ask(model, prompts, options.tokens, options.frames, options.peer_threads)
    _require_same([answer for run in runs for answer in run.answers], answers)
    for run in closed:
        run.peer_answers = chat.in_line(answers, run.load.concurrency or 1)
        run.load.peer = figures(run.peer_answers, rate_hz)
        # Its requests never overlap, so its throughput does not depend on how many wait.
        busy_s = answers[-1].done_s - answers[0].sent_s
        run.load.peer.audio_s_per_s = sum(answer.samples for answer in answers) / rate_hz / busy_s
        run.load.peer.cpu_s_per_request = cpu_s


def _require_same(ours: Sequence[Answer], theirs: Sequence[Answer]) -> None:
    said = {answer.prompt: answer.said for answer in theirs}
    for answer in ours:
        if answer.error is None and answer.said != said[answer.prompt]:
            sys.exit(f"no figures, for the two sides did not say the same:\n{answer.said}\n{said[answer.prompt]}")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(": ")[1] for line in lines if line.startswith("model name")), processor)
    return {"processor": processor, "cores": os.cpu_count(), "python": platform.python_version()}


def write_json(file: Path, options: argparse.Namespace, runs: Sequence[Run]) -> None:
    """Everything that was measured: figures of each load, and each of its requests."""
    loads = [
        {
            **asdict(run.load),
            "answers": [
                {
                    "prompt": answer.prompt,
                    "text_ms": [(came_s - answer.sent_s) * 1000 for came_s in answer.text_s],
                    "audio_ms_samples": [((came_s - answer.sent_s) * 1000, n) for came_s, n in answer.audio],
                    "total_ms": (answer.done_s - answer.sent_s) * 1000,
                    "timings": answer.timings,
                    "error": answer.error,
                }
                for answer in run.answers
            ],
        }
        for run in runs
    ]
    report = {"machine": machine(), "options": vars(options), "loads": loads}
    file.write_text(json.dumps(report, indent=1, default=str))


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="quartet-bench-") as scratch:
        try:
            with target(options, Path(scratch), arch=options.arch) as at:
                wish = Wish(options.tokens, options.frames, options.temperature, options.seed)
                runs, facts = asyncio.run(load_gateway(at, options, wish))
        except (LaunchError, httpx.HTTPError) as error:
            sys.exit(f"{type(error).__name__}: {error}")
        rate_hz = facts["sample_rate_hz"]
        if options.no_peer or options.temperature or at.model is None:
            console.print("transformers is left out: it needs --model, temperature 0 and no --no-peer")
        elif any(run.load.concurrency for run in runs):
            ask_peer(at.model, runs, options, rate_hz)
    is_recorded = (options.arch, options.tokens, options.frames) == RECORDED and not options.temperature
    if is_recorded and not (options.model or options.url or options.run_dir):
        for run in runs:
            run.load.third_name = VLLM_OMNI.name
            run.load.third = VLLM_OMNI.by_concurrency.get(run.load.concurrency or 0, {})
    show(console, [run.load for run in runs])
    if not at.processes:
        console.print("CPU time and memory: not known of a gateway elsewhere")
    if options.json:
        write_json(options.json, options, runs)
    if options.picture:
        lines = {
            f"{side}, {run.load.concurrency} at a time": first_audio_ms(answers)
            for run in runs
            for side, answers in (("Quartet", run.answers), ("transformers", run.peer_answers))
            if run.load.concurrency and answers
        }
        draw([run.load for run in runs], lines, longest_gaps_ms(runs[-1].answers, rate_hz), options.picture)
    if any(run.load.quartet.failed for run in runs):
        sys.exit("some requests failed; their errors are above")


if __name__ == "__main__":
    main()
