"""A gateway of several worker processes."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from gateway.access.api_keys import digest
from tests.support.systems.stack import free_port

WORKERS = 2
TRIES = 24  # connections: that one process gets them all is a chance of 1 to 2 ** 23
ALICE, BOB = "sk-quartet-alice", "sk-quartet-bob"  # Alice may have one request at a time, Bob administers


@dataclass
class Gateway:
    """One that runs."""

    url: str
    process: asyncio.subprocess.Process

    async def ask(self, method: str, path: str, key: str = BOB, **options) -> httpx.Response:
        """By a connection of its own, so that any process may answer."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60, verify=False) as client:
            return await client.request(method, path, headers={"authorization": f"Bearer {key}"}, **options)

    async def everywhere(self, method: str, path: str, key: str = BOB, **options) -> list[httpx.Response]:
        """The answers of many connections."""
        return [await self.ask(method, path, key, **options) for _ in range(TRIES)]

    def processes(self) -> list[psutil.Process]:
        """The workers."""
        return psutil.Process(self.process.pid).children()

    @asynccontextmanager
    async def connections(self) -> AsyncIterator[dict[psutil.Process, httpx.AsyncClient]]:
        """A client of each worker, by one connection that stays open."""
        found: dict[psutil.Process, httpx.AsyncClient] = {}
        limits, headers = httpx.Limits(max_connections=1, keepalive_expiry=None), {"authorization": f"Bearer {BOB}"}
        async with AsyncExitStack() as stack:
            while len(found) < WORKERS:
                client = httpx.AsyncClient(base_url=self.url, timeout=60, headers=headers, limits=limits, verify=False)
                stack.push_async_callback(client.aclose)
                async with client.stream("GET", "/health") as answer:
                    found.setdefault(self.process_of(answer), client)
                    await answer.aread()
            yield found

    def process_of(self, answer: httpx.Response) -> psutil.Process:
        """The worker that an unfinished `answer` comes from."""
        client = answer.extensions["network_stream"].get_extra_info("client_addr")
        (serving,) = [
            each
            for each in self.processes()
            if any(link.raddr and link.raddr.port == client[1] for link in each.net_connections("tcp"))
        ]
        return serving

    async def numbers(self) -> set[str]:
        """The processes that say something."""
        try:
            page = (await self.ask("GET", "/metrics")).text
        except httpx.TransportError:
            return set()
        families = text_string_to_metric_families(page)
        return {
            sample.labels["worker"] for family in families for sample in family.samples if "worker" in sample.labels
        }

    async def all_listen(self) -> None:
        async with asyncio.timeout(300):
            while len(await self.numbers()) < WORKERS:
                assert self.process.returncode is None
                await asyncio.sleep(0.05)


@asynccontextmanager
async def workers_before(
    pipeline: Path | str, stages: Mapping[str, str], folder: Path, **settings: object
) -> AsyncIterator[Gateway]:
    """A gateway of WORKERS that all listen.

    Args:
        stages: their addresses.
        folder: gets the file of API keys.
    """
    keys = folder / "keys.yaml"
    limits = {ALICE: "max_concurrent_requests: 1", BOB: "admin: true"}
    entries = [f'  - name: {key[11:]}\n    sha256: "{digest(key)}"\n    {limit}\n' for key, limit in limits.items()]
    keys.write_text("keys:\n" + "".join(entries))
    port = free_port()
    flags = {"port": port, "workers": WORKERS, "api_keys_file": keys, "health_timeout_s": 60, **settings}
    command = [sys.executable, "-m", "gateway", f"--pipeline={pipeline}"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    command += [f"--stage={stage}={address}" for stage, address in stages.items()]
    process = await asyncio.create_subprocess_exec(*command)
    running = Gateway(f"http://127.0.0.1:{port}", process)
    try:
        await running.all_listen()
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
