"""Thousands of spoken requests, some of them cancelled at any moment, while stages are killed with SIGKILL: is anything
lost, wrong, or left behind?

Starts a system on the small model, every tensor between its stages by one transport. Prints what the processes held
before and after, and ends with an error if an answer was wrong, an error untyped, or anything is left.
"""

import argparse
import asyncio
import collections
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.systems.holdings import Holding, holdings, sent_bytes
from benchmarks.systems.processes import system_pids
from benchmarks.traffic.client import Gateway, Wish
from cli.plan import PIPELINE, LaunchOptions
from cli.supervisor import free_ports
from cli.tiny import make_checkpoint
from cli.up import console, running

STAGES = ("thinker", "talker", "code2wav")
TRANSPORTS = {
    "inline": ["--transports=inline"],
    "shared_memory": ["--shared-memory-mib=16", "--large-tensor-bytes=1"],
    "ucx": ["--transports=inline,ucx", "--large-tensor-bytes=1"],
}
QUESTIONS = tuple(f"Tell me {number} things about the sea." for number in range(24))
BACK_OFF_S = 0.25  # after a refusal
BACK_WITHIN_S, READY_POLL_S = 180.0, 0.1
IDLE_WITHIN_S = 30.0
LATEST_CANCEL_S = 0.4
# A stage that was killed has no connections to others yet, one that ran long has some.
MORE_FILES, MORE_MEMORY_BYTES = 16, 64 * 2**20


@dataclass
class Tally:
    """What became of the requests."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    said: dict[str, tuple[str, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Requests that a stage worked on."""
        return sum(self.outcomes.values()) - self.outcomes["refused"]


async def ask(gateway: Gateway, question: str, cancel_s: float | None, tally: Tally) -> None:
    """One request; leaves after `cancel_s`."""
    try:
        async with asyncio.timeout(cancel_s):
            exchange = await gateway.send(question)
    except TimeoutError:
        tally.outcomes["cancelled"] += 1
        return
    answer = exchange.answer()
    if exchange.status == 503:
        tally.outcomes["refused"] += 1
        await asyncio.sleep(BACK_OFF_S)
    elif answer.error is None:
        tally.outcomes["answered"] += 1
        if tally.said.setdefault(question, answer.said) != answer.said:
            tally.faults.append(f"{question}: another answer than before")
    elif answer.error.startswith("stage_unavailable"):
        tally.outcomes["failed, typed"] += 1
    else:
        tally.faults.append(f"{question}: {answer.error}")


async def load(gateway: Gateway, flags: argparse.Namespace, order: random.Random, tally: Tally, shown) -> None:
    """`flags.concurrency` clients, until `flags.requests` are done."""

    async def client() -> None:
        while tally.done < flags.requests:
            cancel_s = order.uniform(0, LATEST_CANCEL_S) if order.random() < flags.cancelled else None
            await ask(gateway, order.choice(QUESTIONS), cancel_s, tally)
            shown(tally.done)

    async with asyncio.TaskGroup() as clients:
        for _ in range(flags.concurrency):
            clients.create_task(client())


async def kill(run_directory: Path, url: str, flags: argparse.Namespace, order: random.Random, tally: Tally) -> int:
    """Kills a stage each time that another part of the requests is done; returns how many it killed."""
    killed = 0
    while killed < flags.kills:
        due = (killed + 0.5) * flags.requests / flags.kills
        if tally.done < due:
            await asyncio.sleep(0.05)
            continue
        os.kill(system_pids(run_directory)[order.choice(STAGES)], signal.SIGKILL)
        killed += 1
        await asyncio.sleep(1)  # the gateway knows by then
        await until_ready(url)
    return killed


async def until_ready(url: str) -> None:
    async with httpx.AsyncClient() as client:
        for _ in range(int(BACK_WITHIN_S / READY_POLL_S)):
            if (await client.get(f"{url}/ready")).status_code == 200:
                return
            await asyncio.sleep(READY_POLL_S)
    sys.exit(f"not ready within {BACK_WITHIN_S:g} s")


async def compile_a_grammar(url: str) -> None:
    """The thinker's process for that has 300 MiB and starts a minute after it: memory is compared when it is there."""
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 1}
    async with httpx.AsyncClient(timeout=BACK_WITHIN_S) as client:
        (await client.post(f"{url}/v1/chat/completions", json=body)).raise_for_status()


async def at_rest(run_directory: Path, faults: list[str]) -> dict[str, Holding]:
    """Holdings once nothing is under way."""
    end = time.monotonic() + IDLE_WITHIN_S
    while True:
        now = await asyncio.to_thread(holdings, run_directory)
        held = {f"{name}: {what}": value for name, each in now.items() for what, value in each.held.items() if value}
        if not held or time.monotonic() > end:
            faults += [f"{what} = {value:g} at rest" for what, value in held.items()]
            return now
        await asyncio.sleep(0.2)


async def soak(url: str, run_directory: Path, flags: argparse.Namespace) -> list[str]:
    """All of it; returns what was wrong."""
    order, tally = random.Random(flags.seed), Tally()
    gateway = Gateway(url, Wish(tokens=12, frames=16, temperature=0.0, seed=0))
    try:
        await gateway.facts()
        await compile_a_grammar(url)
        for question in QUESTIONS:  # how each is answered when it is asked alone; every connection is there
            await ask(gateway, question, None, tally)
        warm_up = argparse.Namespace(**vars(flags) | {"requests": 10 * len(QUESTIONS), "cancelled": 0.2})
        await load(gateway, warm_up, order, tally, lambda done: None)
        before = await at_rest(run_directory, tally.faults)
        tally.outcomes.clear()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("requests", total=flags.requests)
            killing = asyncio.create_task(kill(run_directory, url, flags, order, tally))
            await load(gateway, flags, order, tally, lambda done: progress.update(bar, completed=done))
            killed = await killing
        await until_ready(url)
        after = await at_rest(run_directory, tally.faults)
        for question in QUESTIONS:
            await ask(gateway, question, None, tally)
        for stage in ("thinker", "talker"):
            if not (await asyncio.to_thread(sent_bytes, run_directory, stage)).get(flags.transport):
                tally.faults.append(f"{stage} sent nothing by {flags.transport}")
    finally:
        await gateway.close()
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(tally.outcomes.items()))
    print(f"{flags.transport}: {outcomes}; {killed} kills; {len(tally.faults)} faults")
    report(before, after)
    return tally.faults + grown(before, after)


def report(before: dict[str, Holding], after: dict[str, Holding]) -> None:
    """A table of both."""
    print("| | files before | after | memory before | after | |\n|---|---|---|---|---|---|")
    for name, first in before.items():
        last = after[name]
        cells = first.files, last.files, *(f"{each.memory_bytes / 2**20:.0f} MiB" for each in (first, last))
        print(f"| {name} | " + " | ".join(map(str, cells)) + f" | {'' if first.pid == last.pid else 'was killed'} |")


def grown(before: dict[str, Holding], after: dict[str, Holding]) -> list[str]:
    """Who holds more than it should."""
    faults = []
    for name, first in before.items():
        last = after[name]
        if last.files > first.files + MORE_FILES:
            faults.append(f"{name}: {last.files} open files, before {first.files}")
        if last.memory_bytes > first.memory_bytes + MORE_MEMORY_BYTES:
            faults.append(f"{name}: {last.memory_bytes / 2**20:.0f} MiB, before {first.memory_bytes / 2**20:.0f} MiB")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="qwen3-omni", help="of that `quartet tiny`: qwen3-omni or qwen2.5-omni")
    parser.add_argument("--transport", choices=TRANSPORTS, default="shared_memory", help="of all tensors")
    parser.add_argument("--requests", type=int, default=10_000, help="that a stage begins to work on")
    parser.add_argument("--kills", type=int, default=50, help="of a stage drawn by chance, evenly over the requests")
    parser.add_argument("--cancelled", type=float, default=0.25, help="part of the requests that the client leaves")
    parser.add_argument("--concurrency", type=int, default=16, help="clients")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    flags = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="quartet-soak-") as scratch,
        tempfile.TemporaryDirectory(prefix="quartet-soak-", dir="/dev/shm") as arenas,  # this system's alone
    ):
        model = make_checkpoint(Path(scratch) / "tiny", seed=0, size="tiny", arch=flags.arch)
        settings = [*TRANSPORTS[flags.transport], f"--shared-memory-dir={arenas}"]
        arguments = {"thinker": settings, "talker": settings}
        arguments["code2wav"] = [each for each in settings if "-mib=" not in each]  # it sends nothing
        run_directory = Path(scratch) / "run"
        options = LaunchOptions(str(model), "127.0.0.1", free_ports(1)[0], PIPELINE, run_directory, arguments)
        with running(options) as stack:
            faults = asyncio.run(soak(stack.url, run_directory, flags))
            alive = os.listdir(arenas)
            if len(alive) > 2:  # the thinker's and the talker's
                faults.append(f"{len(alive)} arenas: {sorted(alive)}")
        if left := os.listdir(arenas):
            faults.append(f"arenas left: {sorted(left)}")
    print("\n".join(faults[:20]) or "nothing is lost, wrong or left")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
