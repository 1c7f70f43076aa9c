"""Arenas in a test: a directory of their own in /dev/shm, a producer in this process, peers in other ones.

Run as a script it is such a peer: `produce DIRECTORY` or `consume DIRECTORY ADDRESS STREAM`. It says on stdout what it
does, a JSON object a line, and then waits to be killed.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import torch
from prometheus_client import REGISTRY

from quartet.v1 import stream_pb2, stream_pb2_grpc
from services.common.rpc import channels
from services.common.stream.consumer import StreamMessage
from services.common.stream.hub import StreamHub, TensorStreamServicer
from services.common.stream.rows import Chunk, Rows
from services.common.stream.shared_memory import SharedMemoryTransport
from services.common.stream.tensors import Transport
from tests.support.stage.streaming import CHANNELS, reading, subscribe

MIB = 2**20
BOTH = ("inline", "shared_memory")
MIN_BYTES = 64 * 1024
READY_S = 60


@contextlib.contextmanager
def arena_directory() -> Iterator[Path]:
    """An empty directory in /dev/shm, which must be empty again at the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="arenas-") as directory:
        yield Path(directory)
        assert not list(Path(directory).iterdir())


@contextlib.asynccontextmanager
async def serving(*transports: Transport) -> AsyncIterator[tuple[StreamHub, str]]:
    """A server of streams that go by `transports`, which stay open: (hub, address)."""
    hub, server = StreamHub(), grpc.aio.server(options=channels.SERVER_OPTIONS)
    hub.transports += transports
    stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(hub, "shm-test"), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield hub, address
    finally:
        await server.stop(None)
        await CHANNELS.close_all()


@contextlib.asynccontextmanager
async def producing(transport: SharedMemoryTransport) -> AsyncIterator[tuple[StreamHub, str]]:
    """A server of streams with `transport`'s arena: (hub, address). The arena is removed at the end."""
    try:
        async with serving(transport) as served:
            yield served
    finally:
        transport.close()


def source(address: str, stream_id: str = "s") -> stream_pb2.StreamSource:
    return stream_pb2.StreamSource(address=address, stream_id=stream_id)


@contextlib.contextmanager
def peer(*arguments: str, script: str = "shm") -> Iterator[tuple[subprocess.Popen, dict]]:
    """A process of this file, or of another one, and what it says when it is ready."""
    command = [sys.executable, "-m", f"tests.support.stage.{script}", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        line = process.stdout.readline()
        assert line, f"the peer ended with {process.wait(READY_S)}"
        yield process, json.loads(line)
    finally:
        process.kill()
        process.wait(READY_S)
        process.stdout.close()


@contextlib.asynccontextmanager
async def edge(
    directory: Path, size_bytes: int = 8 * MIB, reads: tuple[str, ...] = BOTH, min_bytes: int = MIN_BYTES
) -> AsyncIterator[tuple[StreamHub, SharedMemoryTransport, str]]:
    """(producer's hub, its transport, its address), for consumers in this process."""
    transport = SharedMemoryTransport(directory, size_bytes, min_bytes)
    async with producing(transport) as (hub, address):
        with reading(directory, *reads):
            yield hub, transport, address


def tensors(count: int = 6, size: int = MIB // 4) -> list[torch.Tensor]:
    """Random ones of (16, size / 64) in several dtypes, `size` bytes each."""
    torch.manual_seed(count)
    dtypes = [torch.float32, torch.bfloat16, torch.int16, torch.uint8]
    made = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(count)]
    return [raw.view(dtypes[i % len(dtypes)]).view(16, -1) for i, raw in enumerate(made)]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether they are the same to the bit; NaNs are."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(as_raw(left), as_raw(right))


def as_raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as uint8."""
    return tensor.contiguous().view(torch.uint8)


async def read_all(messages: AsyncIterator[StreamMessage]) -> dict[str, torch.Tensor]:
    """Name -> all of its rows, copied."""
    parts: dict[str, list[torch.Tensor]] = {}
    async for message in messages:
        if isinstance(message, Chunk):
            for rows in message.rows:
                parts.setdefault(rows.name, []).append(rows.tensor.clone())
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"quartet_{name}", {"stage": "shm-test", **labels}) or 0.0


async def produce(directory: Path) -> None:
    """Offers a stream "s" of eight tensors of 1 MiB, and never ends it."""
    transport = SharedMemoryTransport(directory, 16 * MIB, MIB)
    async with producing(transport) as (hub, address):
        with hub.open("s", ["states"]) as stream:
            stream.start(0)
            for i in range(8):
                stream.put([Rows("states", i, torch.full((1, MIB), i, dtype=torch.uint8))])
            print(json.dumps({"address": address, "arena": transport.arena.name}), flush=True)
            await asyncio.Event().wait()


async def consume(directory: Path, address: str, stream_id: str) -> None:
    """Reads a stream and keeps all of it."""
    held = []
    with reading(directory, "inline", "shared_memory"):
        async with subscribe(source(address, stream_id), "r", []) as messages:
            async for message in messages:
                if isinstance(message, Chunk):
                    held += message.rows
                    if len(held) == 4:
                        print(json.dumps({"held": len(held)}), flush=True)


if __name__ == "__main__":
    run, directory = {"produce": produce, "consume": consume}[sys.argv[1]], Path(sys.argv[2])
    asyncio.run(run(directory, *sys.argv[3:]))
