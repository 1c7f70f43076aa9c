"""CPU time of text answers by one gateway, by two, and by two that share nothing; of their database too; and how often
they call that."""

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
import psycopg
from rich.table import Table

from benchmarks.systems import scripted
from benchmarks.systems.gateways import GatewayProcess
from benchmarks.systems.processes import Groups, tree_cpu_s

CHAT, STORED, CHAINED = "plain chat", "stored response", "chained response"
FLOWS = (CHAT, STORED, CHAINED)
ONE, TWO, APART = "one", "two", "two apart"
KINDS = (ONE, TWO, APART)
_CHAIN = 4  # responses of a chain: what one costs depends on how many are before it
_FLUSHED_S = 11.0  # PostgreSQL's connections tell their counts ten seconds after their last transaction
_TRANSACTIONS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s"


@dataclass
class Service:
    """Gateways before one database.

    Attributes:
        kind: ONE; TWO; or APART, of which each gateway has a database to itself. What these two cost more than one does
            is the machine's matter: what two processes on a core, and busier stages and clients, cost each other.
        server_url: of another database of its server, so that a look is not counted.
        database: the only one, or any.
    """

    kind: str
    gateways: Sequence[GatewayProcess]
    server_url: str
    server_pid: int
    database: str

    def cpu_s(self) -> tuple[float, float]:
        """CPU time that (its gateways, the database's server) used so far."""
        leaders = {gateway.url: gateway.pid for gateway in self.gateways}
        return sum(Groups(leaders).cpu_s().values()), tree_cpu_s(self.server_pid)

    def transactions(self) -> int:
        """That the database has had so far."""
        with psycopg.connect(self.server_url, autocommit=True) as connection:
            row = connection.execute(_TRANSACTIONS, [self.database]).fetchone()
        assert row is not None
        return row[0]


@dataclass
class Cost:
    """Of one load, less what is used without any.

    Attributes:
        requests_per_s: in all.
        gateway_ms, database_ms: CPU time of a request.
    """

    requests_per_s: float
    gateway_ms: float
    database_ms: float


async def load(service: Service, flow: str, requests: int, concurrency: int) -> float:
    """Seconds that `requests` took, `concurrency` at a time at each gateway. Each client goes round the gateways, but
    of those that are apart: a chain stays where its responses are."""
    gateways, left = service.gateways, iter(range(requests))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    async def client(number: int, http: httpx.AsyncClient) -> None:
        before = None
        for i in itertools.count():
            if next(left, None) is None:
                return
            turn = number if service.kind == APART else number + i
            url = gateways[turn % len(gateways)].url
            before = await _ask(http, url, flow, before if i % _CHAIN else None)

    async with httpx.AsyncClient(timeout=600, limits=limits) as http:
        began_s = time.perf_counter()
        await asyncio.gather(*(client(number, http) for number in range(concurrency * len(gateways))))
        return time.perf_counter() - began_s


async def _ask(http: httpx.AsyncClient, url: str, flow: str, before: str | None) -> str:
    """The answer's id. `before`: of the last one, which a chained response continues. Exits if there is no answer."""
    if flow == CHAT:
        path, said = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
    else:
        path, said = "/v1/responses", {"input": "Hello"}
        if flow == CHAINED and before is not None:
            said["previous_response_id"] = before
    answer = await http.post(url + path, json={"model": scripted.MODEL, **said})
    if answer.status_code != 200:
        sys.exit(f"{url}{path}: {answer.status_code} {answer.text}")
    return answer.json()["id"]


async def measure(services: Sequence[Service], flags: argparse.Namespace) -> dict[tuple[str, str], list[Cost]]:
    """Costs by (flow, kind), one of each round."""
    for service in services:  # warms up
        for flow in FLOWS:
            await load(service, flow, 8 * flags.concurrency, flags.concurrency)
    await asyncio.sleep(_FLUSHED_S)
    costs = defaultdict[tuple[str, str], list[Cost]](list)
    for number in range(flags.rounds):
        for service in [*services[number % len(services) :], *services[: number % len(services)]]:
            idle = await _used(service, flags.idle_s)
            for flow in FLOWS:
                before, took_s = service.cpu_s(), await _load(service, flow, flags)
                used = [after - each for after, each in zip(service.cpu_s(), before, strict=True)]
                requests = flags.requests * len(service.gateways)
                ms = [1000 * (each - rest * took_s) / requests for each, rest in zip(used, idle, strict=True)]
                costs[flow, service.kind].append(Cost(requests / took_s, *ms))
    return costs


async def _load(service: Service, flow: str, flags: argparse.Namespace) -> float:
    return await load(service, flow, flags.requests * len(service.gateways), flags.concurrency)


async def _used(service: Service, seconds: float) -> list[float]:
    """CPU seconds that (the gateways, the database) use a second, without a request."""
    before = service.cpu_s()
    await asyncio.sleep(seconds)
    return [(after - each) / seconds for after, each in zip(service.cpu_s(), before, strict=True)]


async def count(service: Service, flags: argparse.Namespace) -> dict[str, tuple[int, float]]:
    """By flow, transactions of the database during a load, and how many there are in as much time
    without a request: gateways look for batches and renew leases."""
    await asyncio.sleep(_FLUSHED_S)
    first, began_s = service.transactions(), time.perf_counter()
    await asyncio.sleep(2 * _FLUSHED_S)
    idle_per_s = (service.transactions() - first) / (time.perf_counter() - began_s)
    counts = {}
    for flow in FLOWS:
        first, began_s = service.transactions(), time.perf_counter()
        await _load(service, flow, flags)
        await asyncio.sleep(_FLUSHED_S)
        counts[flow] = service.transactions() - first, idle_per_s * (time.perf_counter() - began_s)
    return counts


def report(costs: Mapping[tuple[str, str], Sequence[Cost]]) -> Table:
    """Medians of the rounds (and their range), CPU time of a request; and the ratios of two gateways to one, and to two
    that share nothing."""
    table = Table("", "gateways", "requests/s", "gateways' CPU ms", "database's CPU ms", "its share")
    for flow in FLOWS:
        medians = dict[str, list[float]]()
        for kind in KINDS:
            rounds = costs[flow, kind]
            columns = [[getattr(each, name) for each in rounds] for name in vars(rounds[0])]
            medians[kind] = _, gateway_ms, database_ms = [statistics.median(column) for column in columns]
            cells = [
                f"{median:.3g} ({min(column):.3g} to {max(column):.3g})"
                for median, column in zip(medians[kind], columns, strict=True)
            ]
            table.add_row(flow, kind, *cells, f"{max(0.0, database_ms) / (gateway_ms + database_ms):.1%}")
        for other in (ONE, APART):
            pairs = zip(medians[other], medians[TWO], strict=True)
            ratios = [f"{two / value:.3f}" if value > 0 else "" for value, two in pairs]
            ratios[2] = "" if flow == CHAT else ratios[2]  # of next to nothing
            table.add_row("", f"{TWO} : {other}", *ratios, "", end_section=other == APART)
    return table
