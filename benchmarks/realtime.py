"""`/v1/realtime` under load (`make bench-realtime`): how soon an answer sounds after the user's last sample, how soon
it is silent when the user speaks, and what listening costs. `--open 200 --speaking 30`: what each user hears in a crowd
of sessions, on each `--transport`.

Users are voices of espeak-ng, sent in real time. Beside it a client that finds the end of turns by itself and sends
each whole to chat completions. docs/benchmarks.md defines every figure.
"""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import httpx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.conversations.barge_in import barge_in
from benchmarks.conversations.crowd import gather_crowd
from benchmarks.conversations.crowd_report import show_crowds
from benchmarks.conversations.espeak import Speaker
from benchmarks.conversations.first_sound import Chat, Realtime, WholeTurns, talk
from benchmarks.conversations.hearing import detector_ms_per_s, listen
from benchmarks.conversations.microphone import Lost
from benchmarks.conversations.report import SIDES, Report, Speculations, show
from benchmarks.conversations.transports import TRANSPORTS, Quiet
from benchmarks.conversations.utterances import Utterance, utterance
from benchmarks.speech import console, machine, started
from benchmarks.systems.gateways import GatewayProcess, gateway, pipeline, stage_addresses
from benchmarks.traffic.client import Gateway
from benchmarks.traffic.load import PROMPTS
from cli.plan import LaunchError
from services.common.engine.process import freeze_heap

PAUSE_S = 0.3  # within every other turn: longer than a speculation waits for, shorter than server_vad does
HEALTH = "--health-timeout-s=60"  # a stage that is only late is not down
ENDLESS = (
    {"ignore_eos": True, "max_tokens": 10_000, "temperature": 0},
    {
        "temperature": 1,
        "seed": 3,
        "repetition_penalty": 0.01,
        "max_frames": 4000,
    },
)


@dataclass
class Target:
    """What is loaded: gateways before the same stages.

    Attributes:
        addresses: of the stages.
        plain: without speculation.
        speculating: with it.
        endless: with it too, and answers that do not end.
    """

    addresses: Mapping[str, str]
    plain: GatewayProcess
    speculating: GatewayProcess
    endless: GatewayProcess


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, help="of a `quartet up` on this machine; default: starts a system")
    parser.add_argument("--model", type=Path, help="checkpoint directory to start; default: a new `quartet tiny`")
    parser.add_argument("--flag", action="append", default=[], metavar="STAGE.SETTING=VALUE", help="may be repeated")
    parser.add_argument("--sessions", type=int, nargs="*", default=[1, 8, 32], help="at a time (1 8 32)")
    parser.add_argument("--turns", type=int, help="of each side at each number; default: 3 a session, at least 12")
    parser.add_argument("--rounds", type=int, default=2, help="in which the sides take turns (2)")
    parser.add_argument("--append-ms", type=int, default=20, help="of sound in an append (20)")
    parser.add_argument("--tokens", type=int, default=24, help="most text tokens of an answer")
    parser.add_argument("--frames", type=int, default=40, help="most codec frames of an answer")
    parser.add_argument("--barging", type=int, default=8, help="sessions in which answers are interrupted; 0: none")
    parser.add_argument("--barge-ins", type=int, default=13, help="of each of these")
    parser.add_argument("--listening", type=int, default=100, help="sessions that only send sound; 0: none")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which they do")
    parser.add_argument("--open", type=int, default=0, help="sessions of a crowd, of which some speak (0: none)")
    parser.add_argument("--speaking", type=int, default=30, help="of these (30)")
    parser.add_argument("--user-turns", type=int, default=4, help="of each who speaks (4)")
    parser.add_argument("--quiet", choices=get_args(Quiet), default="nothing", help="what the others send (nothing)")
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=["websocket"], help="of the crowds")
    parser.add_argument("--json", type=Path, help="write all figures and every turn here")
    options = parser.parse_args(arguments)
    if min(options.sessions, default=1) < 1 or options.rounds < 1:
        parser.error("--sessions, --rounds: must be 1 or more")
    if options.open and not 0 < options.speaking <= options.open:
        parser.error("--speaking: must be 1 to the number of --open")
    if not 10 <= options.append_ms <= 200:
        parser.error("--append-ms: must be 10 to 200")
    return options


@contextmanager
def target(options: argparse.Namespace, scratch: Path) -> Iterator[Target]:
    """The system to load; stages and gateways are stopped again, unless they were running."""
    run_directory: Path = options.run_dir or scratch / "run"
    short = {"temperature": 0, "max_tokens": options.tokens}, {"temperature": 0, "max_frames": options.frames}
    with ExitStack() as exits:
        if options.run_dir is None:
            exits.enter_context(started(options, run_directory, scratch / "tiny"))
        addresses = stage_addresses(run_directory)

        kept = exits.enter_context(socket.create_server(("127.0.0.1", 0)))  # no gateway takes it meanwhile
        calls_port = kept.getsockname()[1]

        def start(name: str, sampling: tuple[Mapping, Mapping], speculates: bool) -> GatewayProcess:
            file = pipeline(scratch / f"{name}.yaml", *sampling)
            flags = [HEALTH, f"--max-realtime-sessions={max(256, options.open)}"]
            flags += [f"--realtime-speculation={str(speculates).lower()}", f"--webrtc=http://127.0.0.1:{calls_port}"]
            return exits.enter_context(gateway(addresses, file, scratch / f"{name}.log", *flags))

        at = Target(addresses, start("plain", short, False), start("on", short, True), start("long", ENDLESS, True))
        if options.open and "webrtc" in options.transport:
            from benchmarks.conversations.webrtc_calls import call_process  # needs quartet[webrtc]

            kept.close()
            log = scratch / "calls.log"
            exits.enter_context(call_process(at.speculating.url, calls_port, log, options.open))
        yield at


def turns_of(count: int, first: int = 0) -> list[Utterance]:
    """What users say; no two turns are the same. Every other has a pause within it."""
    speaker, turns = Speaker(), []
    for number in range(first, first + count):
        words = PROMPTS[number % len(PROMPTS)].split()
        middle = len(words) // 2
        clauses = [" ".join(words[:middle]), " ".join(words[middle:])] if number % 2 else [" ".join(words)]
        turns.append(utterance(speaker, clauses, PAUSE_S, seed=number))
    return turns


async def measure(at: Target, options: argparse.Namespace, report: Report) -> None:
    """All loads. Raises Lost."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    freeze_heap()  # a full collection in this process would look like a stall of the system
    with Progress(*columns, console=console) as progress:
        await _warm_up(at, options)
        for sessions in options.sessions:
            await _first_sounds(at, sessions, options, report, progress)
        if options.barging:
            total = options.barging * options.barge_ins + 1 + options.barge_ins // 4
            bar = _bar(progress, f"{options.barging} sessions interrupt", total)
            load = (options.barging, options.barge_ins, turns_of(8)[::2], options.append_ms / 1000)
            report.silences = await barge_in(at.endless.url, at.addresses, *load, lambda: progress.advance(bar))
            report.barging = options.barging
        if options.listening:
            bar = _bar(progress, f"{options.listening} sessions listen", round(options.seconds))
            turns = turns_of(8)
            report.detector_ms = await detector_ms_per_s(options.listening, min(2.0, options.seconds), turns[0])
            load = (at.plain.pid, options.listening, options.seconds, turns)
            report.cost = await listen(at.plain.url, *load, lambda: progress.advance(bar))
        for transport in options.transport if options.open else ():
            bar = _bar(progress, f"{options.open} open by {transport}", options.speaking * options.user_turns)
            turns = turns_of(options.speaking * options.user_turns)
            load = (options.open, options.quiet, [turns[n :: options.speaking] for n in range(options.speaking)])
            crowd = gather_crowd(at.speculating, transport, *load, lambda bar=bar: progress.advance(bar))
            report.crowds[transport] = await crowd


def _bar(progress: Progress, title: str, total: int) -> TaskID:
    """Makes a bar; in a log a line, as bars appear there only at the end."""
    if not console.is_terminal:
        console.print(title)
    return progress.add_task(title, total=total)


async def _warm_up(at: Target, options: argparse.Namespace) -> None:
    for each in (at.plain, at.speculating):
        await talk(Realtime(each.url, options.append_ms / 1000).turn, 2, turns_of(2, 10_000), lambda: None)


async def _first_sounds(
    at: Target, sessions: int, options: argparse.Namespace, report: Report, progress: Progress
) -> None:
    """The three sides in turn."""
    turns = turns_of(options.turns or max(12, 3 * sessions))
    bar = _bar(progress, f"{sessions} at a time", len(SIDES) * len(turns))
    chat, append_s = Gateway(at.plain.url, Chat()), options.append_ms / 1000
    try:
        await chat.facts()
        takes = (Realtime(at.plain.url, append_s), Realtime(at.speculating.url, append_s), WholeTurns(chat))
        taken = report.turns[sessions] = {side: [] for side in SIDES}
        before = at.speculating.scrape()
        for number in range(options.rounds):
            for side, take in zip(SIDES, takes, strict=True):
                part = turns[number :: options.rounds]
                taken[side] += await talk(take.turn, sessions, part, lambda: progress.advance(bar))
    finally:
        await chat.close()
    after = at.speculating.scrape()

    def grown(metric: str, **labels: str) -> float:
        return (after.total(f"quartet_gateway_{metric}", **labels) or 0.0) - (
            before.total(f"quartet_gateway_{metric}", **labels) or 0.0
        )

    used, wasted = (grown("speculations_total", outcome=outcome) for outcome in ("used", "wasted"))
    saved_s, count = grown("speculation_saved_seconds_sum"), grown("speculation_saved_seconds_count")
    report.speculations[sessions] = Speculations(used, wasted, 1000 * saved_s / count if count else None)


def main() -> None:
    options, report, lost = parse(), Report(), None
    with tempfile.TemporaryDirectory(prefix="quartet-bench-") as scratch:
        try:
            with target(options, Path(scratch)) as at:
                asyncio.run(measure(at, options, report))
        except (LaunchError, RuntimeError, Lost, httpx.HTTPError) as error:
            lost = f"{type(error).__name__}: {error}"
    show(console, report)
    if report.crowds:
        show_crowds(console, report.crowds)
    if options.json:
        told = {"machine": machine(), "options": vars(options), **report.to_json()}
        options.json.write_text(json.dumps(told, indent=1, default=str))
    if lost is not None:
        sys.exit(lost)
    if report.failed:
        sys.exit("some turns failed; their errors are above")


if __name__ == "__main__":
    main()
