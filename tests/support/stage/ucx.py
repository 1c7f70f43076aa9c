"""Streams by UCX in a test: a producer in this process, consumers in this one or in others.

Run as a script it is such a peer: `produce` or `consume ADDRESS STREAM`. It says on stdout what it does, a JSON object
a line, and then waits to be killed.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.stream import ucx, ucx_worker
from services.common.stream.hub import StreamHub
from services.common.stream.rows import Chunk, Rows
from services.common.stream.ucx import UcxTransport
from services.common.stream.ucx_worker import UcxWorker
from tests.support.stage.shm import MIB, MIN_BYTES, serving, source
from tests.support.stage.streaming import reading, subscribe

ARENAS = Path("/dev/shm")
# A peer here is slow only where the machine is; a test of one that hangs sets less.
ucx_worker.CONNECT_TIMEOUT_S = ucx.HUNG_S = 60.0


@contextlib.contextmanager
def working() -> Iterator[UcxWorker]:
    """A worker, with nothing under way at the end."""
    worker = UcxWorker()
    try:
        yield worker
        end = time.monotonic() + 60
        while worker._running:  # what has arrived is known to its sender a little later
            assert time.monotonic() < end
            time.sleep(0.001)
    finally:
        worker.close()


async def connected(worker: UcxWorker) -> None:
    """Returns when `worker` can send to a peer."""
    async with asyncio.timeout(120):
        while not any(peer.obstacle == "" for peer in list(worker._peers.values())):
            await asyncio.sleep(0.01)


@dataclass
class Edge:
    """A producer's hub, its worker and address; the consumer's worker."""

    hub: StreamHub
    producer: UcxWorker
    address: str
    consumer: UcxWorker

    async def connected(self) -> None:
        """Returns when the producer can send to the consumer."""
        self.producer.peer(self.consumer.address)
        await connected(self.producer)


@contextlib.asynccontextmanager
async def edge() -> AsyncIterator[Edge]:
    """A producer, and a consumer in this process; they are connected."""
    with working() as producer, working() as consumer, reading(ARENAS, ucx=consumer):
        async with serving(UcxTransport(producer, MIN_BYTES)) as (hub, address):
            made = Edge(hub, producer, address, consumer)
            await made.connected()
            yield made


async def produce() -> None:
    """Offers a stream "s" of eight tensors of 1 MiB, and never ends it."""
    with working() as worker:
        async with serving(UcxTransport(worker, MIN_BYTES)) as (hub, address):
            with hub.open("s", ["states"]) as stream:
                stream.start(0)
                print(json.dumps({"address": address}), flush=True)
                await stream.subscription(120)
                await connected(worker)
                stream.put([Rows("states", i, torch.full((1, MIB), i, dtype=torch.uint8)) for i in range(8)])
                await asyncio.Event().wait()


async def consume(address: str, stream_id: str) -> None:
    """Reads a stream and keeps all of it; says so after the first tensor, and stops reading."""
    with working() as worker, reading(ARENAS, ucx=worker):
        print(json.dumps({"ready": True}), flush=True)
        async with subscribe(source(address, stream_id), "r", []) as messages:
            async for message in messages:
                if isinstance(message, Chunk):
                    print(json.dumps({"got": message.rows[0].tensor.nbytes}), flush=True)
                    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run({"produce": produce, "consume": consume}[sys.argv[1]](*sys.argv[2:]))
