"""Tensors from one process to another: each transport beside a raw Unix socket and memcpy, in the same run.

Both ends are the code that stages run: StreamHub in a process of its own, `subscribe` in this one.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import numpy as np
import torch
import uvloop

from quartet.v1 import stream_pb2, stream_pb2_grpc
from services.common.rpc import channels
from services.common.stream.consumer import ConsumerTransports, StreamConsumer
from services.common.stream.hub import StreamHub, TensorStreamServicer
from services.common.stream.rows import Chunk, Rows
from services.common.stream.shared_memory import SharedMemoryTransport
from services.common.stream.ucx import UcxTransport
from services.common.stream.ucx_worker import UcxWorker
from services.common.telemetry import logs

KIB, MIB = 2**10, 2**20
SIZES = {"4 KiB": 4 * KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "8 MiB": 8 * MIB, "64 MiB": 64 * MIB}
TRANSPORTS = ("inline", "shared_memory", "ucx")
ARENA_BYTES = 256 * MIB
MOST_PENDING_BYTES = 128 * MIB
TICK_S = 0.002  # uvloop's timers count whole milliseconds: half of one would be a busy loop
# Sent for a rate. What is slow needs less for a steady figure.
RATE_BYTES = {"inline": 128 * MIB, "shared_memory": 512 * MIB, "ucx": 256 * MIB}


@dataclass
class Side:
    """What one process spent on a case: CPU seconds; the longest time that its event loop came too late, for whatever
    reason, and as far as its own thread was working then."""

    cpu_s: float = 0.0
    stall_s: float = 0.0
    held_s: float = 0.0


@dataclass
class Result:
    """Of one case. `latency_s`: from put to whole, one at a time. `rate`: bytes a second, as many as will go."""

    latency_s: float
    rate: float
    cpu_s_per_mib: float = 0.0
    stall_s: float = 0.0
    held_s: float = 0.0


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Side]:
    """Watches this process and its event loop."""
    side = Side()

    async def tick() -> None:
        while True:
            before, worked = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_S)
            stall_s = time.perf_counter() - before - TICK_S
            side.stall_s = max(side.stall_s, stall_s)
            side.held_s = max(side.held_s, min(stall_s, time.thread_time() - worked))

    ticking, cpu = asyncio.create_task(tick()), time.process_time()
    try:
        yield side
    finally:
        side.cpu_s = time.process_time() - cpu
        ticking.cancel()


# The producer's process.


def producer(pipe: Connection, directory: str) -> None:
    """Serves the requests of `pipe`, until it closes."""
    logs.configure("warning", "benchmark")
    with contextlib.suppress(EOFError):
        uvloop.run(_produce(pipe, Path(directory)))


async def _produce(pipe: Connection, directory: Path) -> None:
    hub, server = StreamHub(), grpc.aio.server(options=channels.SERVER_OPTIONS)
    ucx = UcxWorker()
    hub.transports += [SharedMemoryTransport(directory, ARENA_BYTES, 64 * KIB), UcxTransport(ucx, 64 * KIB)]
    stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(hub, "benchmark"), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(f"127.0.0.1:{port}")
    asked: asyncio.Queue = asyncio.Queue()

    def hear() -> None:
        try:
            asked.put_nowait(pipe.recv())
        except EOFError:
            asked.put_nowait(None)

    asyncio.get_running_loop().add_reader(pipe.fileno(), hear)
    while case := await asked.get():
        stream_id, size_bytes, count, in_turn = case
        rows = max(1, size_bytes // (4 * KIB))  # a position is 4 KiB, as of a thinker with hidden size 2,048
        tensor = torch.ones(rows, size_bytes // 2 // rows, dtype=torch.bfloat16)
        async with watched() as side:
            with hub.open(stream_id, ["states"]) as stream:
                stream.start(0)
                await stream.subscription(10)
                for i in range(count):
                    stream.put([Rows("states", i * rows, tensor)])
                    if in_turn:
                        pipe.send(time.monotonic())
                        await asked.get()
                    else:
                        await asyncio.sleep(0)  # as between an engine's steps
                        await stream.room(max(2, MOST_PENDING_BYTES // size_bytes) * rows)
                stream.finish(count * rows)
                await hub.drain()
        pipe.send(side)
    await server.stop(None)
    for transport in hub.transports:
        transport.close()


# The consumer's process: this one.


class Consumer:
    """Reads streams of the producer behind `pipe`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._address, self._streams = pipe, pipe.recv(), 0
        self.ucx = UcxTransport(UcxWorker(), 64 * KIB)
        self.streams = StreamConsumer(channels.Channels())

    async def latency(self, size_bytes: int, count: int) -> list[float]:
        """Seconds from put to the last byte, of tensors sent one at a time."""
        seconds: list[float] = []

        def whole() -> None:
            now = time.monotonic()
            seconds.append(now - self._pipe.recv())
            self._pipe.send("next")

        await self._read(size_bytes, count, True, whole)
        await asyncio.to_thread(self._pipe.recv)  # what the producer spent: it says so once this loop has let go
        return seconds

    async def rate(self, size_bytes: int, count: int) -> tuple[float, Side, Side]:
        """(bytes a second of a stream that is never short of tensors, this process, the producer's)."""
        ends: list[float] = []
        async with watched() as side:
            await self._read(size_bytes, count, False, lambda: ends.append(time.monotonic()))
        return size_bytes * (count - 1) / (ends[-1] - ends[0]), side, await asyncio.to_thread(self._pipe.recv)

    async def _read(self, size_bytes: int, count: int, in_turn: bool, whole: Callable[[], None]) -> None:
        self._streams += 1
        stream_id, got = f"s{self._streams}", 0
        self._pipe.send((stream_id, size_bytes, count, in_turn))
        source = stream_pb2.StreamSource(address=self._address, stream_id=stream_id)
        async with self.streams.subscribe(source, stream_id, []) as messages:
            async for message in messages:
                if not isinstance(message, Chunk):
                    continue
                for rows in message.rows:
                    got += rows.tensor.nbytes
                    if got % size_bytes == 0:
                        whole()


# What both are measured against.


def memcpy(size_bytes: int) -> Result:
    """From one buffer to places in as much memory as the arena has, in turn, in this process."""
    count = max(8, min(2000, 256 * MIB // size_bytes))
    source, memory = np.ones(size_bytes, np.uint8), np.ones(ARENA_BYTES, np.uint8)
    seconds = []
    for i in range(count):
        first = i * size_bytes % ARENA_BYTES
        begin = time.perf_counter()
        np.copyto(memory[first : first + size_bytes], source)
        seconds.append(time.perf_counter() - begin)
    return Result(statistics.median(seconds), size_bytes * count / sum(seconds))


def unix_socket(size_bytes: int) -> Result:
    """From another process, blocking, into one buffer. The latency is there and back, with an answer of one byte."""
    figures, buffer = [], memoryview(bytearray(size_bytes))
    count = max(2, min(500, 128 * MIB // size_bytes))
    for turns in ("in-turn", "at-once"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        script = Path(__file__).parent / "systems" / "socket_sender.py"
        command = [sys.executable, "-S", str(script), str(theirs.fileno()), str(size_bytes), str(count), turns]
        with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]):
            ours.recv(1)  # it has started
            seconds, begin = [], time.perf_counter()
            for _ in range(count):
                before, got = time.perf_counter(), 0
                while got < size_bytes:
                    got += ours.recv_into(buffer[got:])
                seconds.append(time.perf_counter() - before)
                if turns == "in-turn":
                    ours.sendall(b"x")
            rate = size_bytes * count / (time.perf_counter() - begin)
        figures.append(statistics.median(seconds) if turns == "in-turn" else rate)
    return Result(*figures)


async def beside_a_loop(peer: Callable[[int], Result], size_bytes: int) -> Result:
    """What `peer` gives in a thread: the stall of this loop, which does nothing, is the machine's own."""
    async with watched() as side:
        result = await asyncio.to_thread(peer, size_bytes)
    result.stall_s, result.held_s = side.stall_s, side.held_s
    return result


async def measure(consumer: Consumer, directory: str, transport: str, size_bytes: int) -> Result:
    """One transport at one size."""
    ucx = consumer.ucx if transport == "ucx" else None
    consumer.streams.transports = ConsumerTransports(["inline", transport], Path(directory), ucx)
    seconds = await consumer.latency(size_bytes, max(5, min(200, 32 * MIB // size_bytes)))
    count = max(4, min(2000, RATE_BYTES[transport] // size_bytes))
    rate, here, there = await consumer.rate(size_bytes, count)
    cpu_s_per_mib = (here.cpu_s + there.cpu_s) / (size_bytes * count / MIB)
    stall_s, held_s = max(here.stall_s, there.stall_s), max(here.held_s, there.held_s)
    return Result(statistics.median(seconds), rate, cpu_s_per_mib, stall_s, held_s)


async def compare(consumer: Consumer, directory: str, sizes: dict[str, int], rounds: int) -> None:
    """Runs all of it `rounds` times in turn, and prints medians."""
    results: dict[tuple[str, str], list[Result]] = {}
    for _ in range(rounds):
        for size, size_bytes in sizes.items():
            for name, peer in (("memcpy", memcpy), ("Unix socket", unix_socket)):
                results.setdefault((name, size), []).append(await beside_a_loop(peer, size_bytes))
            for transport in TRANSPORTS:
                results.setdefault((transport, size), []).append(
                    await measure(consumer, directory, transport, size_bytes)
                )

    def median(name: str, size: str, figure: str) -> float:
        return statistics.median(getattr(result, figure) for result in results[name, size])

    print("| | " + " | ".join(sizes) + " |\n|" + "---|" * (len(sizes) + 1))
    for name in ("memcpy", "Unix socket", *TRANSPORTS):
        cells = [
            f"{median(name, s, 'latency_s') * 1e3:.3f} ms, {median(name, s, 'rate') / 1e9:.2f} GB/s" for s in sizes
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    for name in ("memcpy", "Unix socket", *TRANSPORTS):
        cells = [f"{median(name, s, 'stall_s') * 1e3:.1f}, {median(name, s, 'held_s') * 1e3:.1f} ms" for s in sizes]
        print(f"| {name}, longest stall of a loop, its own work in one | " + " | ".join(cells) + " |")
    for name in TRANSPORTS:
        cells = [f"{median(name, s, 'cpu_s_per_mib') * 1e3:.2f} ms/MiB" for s in sizes]
        print(f"| {name}, CPU of both ends | " + " | ".join(cells) + " |")
    if "8 MiB" not in sizes:
        return
    shared, inline = median("shared_memory", "8 MiB", "rate"), median("inline", "8 MiB", "rate")
    print(f"shared_memory at 8 MiB: {shared / median('memcpy', '8 MiB', 'rate'):.2f} of memcpy's rate,", end=" ")
    print(f"{shared / inline:.1f} times inline's")
    print(f"ucx at 8 MiB: {median('ucx', '8 MiB', 'rate') / inline:.1f} times inline's rate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times that everything is measured, in turn")
    parser.add_argument("--size", action="append", choices=SIZES, help="only this one; may be repeated")
    arguments = parser.parse_args()
    sizes = {size: SIZES[size] for size in arguments.size or SIZES}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="quartet-benchmark-") as directory:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=producer, args=(theirs, directory))
        process.start()
        theirs.close()
        try:
            consumer = Consumer(ours)
            uvloop.run(compare(consumer, directory, sizes, arguments.rounds))
        finally:
            ours.close()
            process.join(20)
            process.kill()


if __name__ == "__main__":
    main()
