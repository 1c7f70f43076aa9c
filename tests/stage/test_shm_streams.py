"""Streams whose large tensors are in shared memory, over a real gRPC server: the same values, nothing left behind."""

import asyncio
import gc
import random
import threading
from pathlib import Path

import grpc
import psutil
import pytest
import torch

from quartet.v1 import stream_pb2, stream_pb2_grpc
from services.common.errors import InternalError, InvalidInput, StageError
from services.common.rpc.call import Admission, serve_call
from services.common.rpc.status import from_rpc_error
from services.common.stream.hub import StreamHub
from services.common.stream.rows import Chunk, Rows
from services.common.stream.shared_memory import host_facts
from tests.support.clock import until
from tests.support.stage.shm import (
    BOTH,
    MIB,
    MIN_BYTES,
    arena_directory,
    as_raw,
    edge,
    metric,
    read_all,
    same,
    source,
    tensors,
)
from tests.support.stage.streaming import CHANNELS, subscribe

GUARD_S = 120


@pytest.fixture
def directory():
    with arena_directory() as directory:
        yield directory


def sent_bytes(transport: str) -> float:
    return metric("stream_bytes_total", consumer="other", rows="tensors", transport=transport)


@pytest.mark.parametrize("min_bytes", [1, MIN_BYTES])
@pytest.mark.parametrize("reads", [("inline",), BOTH])
async def test_every_transport_carries_the_same_bits(directory: Path, reads: tuple[str, ...], min_bytes: int):
    sent = {f"big.{i}": tensor for i, tensor in enumerate(tensors())} | {"small": torch.arange(7, dtype=torch.int64)}
    before = {transport: sent_bytes(transport) for transport in BOTH}
    async with edge(directory, reads=reads, min_bytes=min_bytes) as (hub, transport, address):
        with hub.open("s", []) as stream:
            stream.start(0)
            stream.put([Rows(name, 0, tensor) for name, tensor in sent.items()])
            stream.finish(0)
            async with asyncio.timeout(GUARD_S), subscribe(source(address), "r", []) as messages:
                got = await read_all(messages)
        assert got.keys() == sent.keys()
        assert all(same(got[name], tensor) for name, tensor in sent.items())
        await until(lambda: transport.arena.used_bytes == 0)
    shared = 0 if reads == ("inline",) else sum(t.nbytes for t in sent.values() if t.nbytes >= min_bytes)
    assert sent_bytes("shared_memory") - before["shared_memory"] == shared
    assert sent_bytes("inline") - before["inline"] == sum(t.nbytes for t in sent.values()) - shared


async def test_a_tensor_is_read_in_place_until_it_is_garbage(directory: Path):
    async with edge(directory) as (hub, transport, address):
        with hub.open("s", ["big"]) as stream:
            stream.start(0)
            first, second = tensors(2)
            stream.put([Rows("big", 0, first), Rows("big", 16, second)])
            stream.finish(32)
            held = []
            async with asyncio.timeout(GUARD_S), subscribe(source(address), "r", []) as messages:
                async for message in messages:
                    if isinstance(message, Chunk):
                        held += [rows.tensor for rows in message.rows]
                    message = None
        # The consumer has read to the end and left. The call stays open, and with it the blocks, while it holds them.
        await asyncio.sleep(0.2)
        assert transport.arena.used_bytes == first.nbytes + second.nbytes
        assert same(held[0], first)
        assert same(held[1], second)
        row = held[1][3]
        held.clear()
        await until(lambda: transport.arena.used_bytes == second.nbytes)  # the row keeps all of its tensor
        assert torch.equal(as_raw(row), as_raw(second[3]))
        del row
        await until(lambda: transport.arena.used_bytes == 0)
        await hub.drain()


async def test_a_full_arena_falls_back_to_messages_with_the_same_values(directory: Path):
    sent = tensors(12)
    full = metric("stream_fallback_bytes_total", transport="shared_memory", reason="full")
    async with edge(directory, size_bytes=MIB) as (hub, transport, address):
        with hub.open("s", ["big"]) as stream:
            stream.start(0)
            stream.put([Rows("big", 16 * i, tensor.view(torch.uint8)) for i, tensor in enumerate(sent)])
            stream.finish(16 * len(sent))
            held: list[Rows] = []
            async with asyncio.timeout(GUARD_S), subscribe(source(address), "r", []) as messages:
                async for message in messages:
                    if isinstance(message, Chunk):
                        held += message.rows
                    assert transport.arena.used_bytes <= MIB
        positions = [rows.first_position for rows in held]
        assert positions == sorted(positions)
        assert torch.equal(torch.cat([r.tensor for r in held]), torch.cat([t.view(torch.uint8) for t in sent]))
        assert transport.arena.used_bytes == MIB
        fell_back = metric("stream_fallback_bytes_total", transport="shared_memory", reason="full") - full
        assert 0 < fell_back <= sum(t.nbytes for t in sent) - MIB  # what was left of a tensor may have found room
        del held, message
        await until(lambda: transport.arena.used_bytes == 0)


async def test_leases_may_end_in_any_thread(directory: Path):
    async with edge(directory) as (hub, transport, address):
        with hub.open("s", ["big"]) as stream:
            stream.start(0)
            stream.put([Rows("big", 16 * i, tensor.view(torch.uint8)) for i, tensor in enumerate(tensors(4))])
            stream.finish(64)
            held = []
            async with subscribe(source(address), "r", []) as messages:
                async for message in messages:
                    held += message.rows if isinstance(message, Chunk) else []
            message = None
        assert transport.arena.used_bytes == MIB
        thread = threading.Thread(target=held.clear)
        thread.start()
        await until(lambda: transport.arena.used_bytes == 0)
        thread.join()


async def test_released_memory_is_used_again_by_the_same_stream(directory: Path):
    """More goes through the arena than fits into it, and nothing falls back while the consumer keeps nothing."""
    full = metric("stream_fallback_bytes_total", transport="shared_memory", reason="full")
    async with edge(directory, size_bytes=MIB) as (hub, transport, address):
        with hub.open("s", ["big"]) as stream:
            stream.start(0)
            async with asyncio.timeout(GUARD_S), subscribe(source(address), "r", []) as messages:
                await anext(messages)
                for i in range(100):
                    tensor = torch.full((1, MIB // 2), i % 256, dtype=torch.uint8)
                    stream.put([Rows("big", i, tensor)])
                    chunk = await anext(messages)
                    assert isinstance(chunk, Chunk)
                    assert torch.equal(chunk.rows[0].tensor, tensor)
                    await until(lambda: transport.arena.used_bytes <= MIB // 2)
                stream.finish(100)
                assert isinstance(await anext(messages), stream_pb2.StreamEnd)
    assert metric("stream_fallback_bytes_total", transport="shared_memory", reason="full") == full


async def test_an_early_end_frees_what_is_lent(directory: Path):
    async with edge(directory) as (hub, transport, address):
        for how in ("left by an error", "cancelled", "failed"):
            with hub.open(how, ["big"]) as stream:
                stream.start(0)
                stream.put([Rows("big", 16 * i, tensor) for i, tensor in enumerate(tensors(2))])
                held = []

                async def consume(stream=stream, how=how, held=held) -> None:
                    async with subscribe(source(address, how), "r", []) as messages:
                        async for message in messages:
                            held += message.rows if isinstance(message, Chunk) else []
                            if len(held) == 2 and how == "left by an error":
                                raise InternalError("of the consumer")
                            if len(held) == 2 and how == "failed":
                                stream.fail(InternalError("of the producer"))

                task = asyncio.create_task(consume())
                await until(lambda held=held: len(held) == 2)
                if how == "cancelled":
                    task.cancel()
                with pytest.raises((StageError, asyncio.CancelledError)):
                    await task
                await until(lambda: transport.arena.used_bytes == 0)
                assert len(held) == 2  # it kept them: their memory is free all the same
        await hub.drain()


class _Context:
    """What `serve_call` needs of gRPC's context where nothing fails."""

    def invocation_metadata(self):
        return ()


async def test_the_end_of_the_consumers_request_ends_its_leases(directory: Path):
    """A tensor that is never garbage holds memory no longer than its request runs."""
    admission = Admission(1, 0, "shm-consumer")
    admission.open()
    async with edge(directory) as (hub, transport, address):
        with hub.open("s", ["big"]) as stream:
            stream.start(0)
            stream.put([Rows("big", 0, tensors(1)[0])])
            stream.finish(16)
            async with serve_call("shm-consumer", "r", _Context(), admission):  # type: ignore[arg-type]
                async with subscribe(source(address), "r", []) as messages:
                    forever = [message async for message in messages]
                await asyncio.sleep(0.1)
                assert transport.arena.used_bytes == MIB // 4
        await until(lambda: transport.arena.used_bytes == 0)
        assert len(forever) == 3


async def _read_on(call: grpc.aio.StreamStreamCall) -> None:
    while True:
        await call.read()


@pytest.mark.parametrize("kind", ["unknown", "twice", "nothing lent", "empty"])
async def test_a_wrong_release_is_refused(directory: Path, kind: str):
    async with edge(directory) as (hub, transport, address):
        with hub.open("s", ["big"]) as stream:
            stream.start(0)
            stream.put([Rows("big", 0, tensors(1)[0])])
            stub = stream_pb2_grpc.TensorStreamServiceStub(CHANNELS.channel(address))
            call = stub.Subscribe()
            subscription = stream_pb2.Subscription(stream_id="s", request_id="r", initial_credits=4)
            if kind != "nothing lent":
                subscription.capabilities.transports.append(stream_pb2.TRANSPORT_SHARED_MEMORY)
                subscription.capabilities.shared_memory_host.CopyFrom(host_facts(directory))
            await call.write(stream_pb2.SubscribeRequest(subscription=subscription))
            await call.read()
            chunk = (await call.read()).chunk
            lease = chunk.rows[0].tensor.shared_memory.lease_id
            released = {"unknown": [lease + 10**6], "twice": [lease, lease], "nothing lent": [1], "empty": []}[kind]
            await call.write(stream_pb2.SubscribeRequest(credit=stream_pb2.Credit(released=released)))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await _read_on(call)
            error = from_rpc_error(refused.value)
            assert isinstance(error, InvalidInput)
            assert error.field == ("credit.chunks" if kind == "empty" else "credit.released")
        await until(lambda: transport.arena.used_bytes == 0)


async def test_nothing_is_overwritten_while_it_is_read(directory: Path):
    """Many streams at a time in an arena that is too small for them, some of them cancelled."""
    order = random.Random(7)
    shared = sent_bytes("shared_memory")

    async def one(hub: StreamHub, address: str, i: int) -> None:
        sizes, pause_s = [order.randrange(MIN_BYTES, MIB // 2) for _ in range(5)], order.random() / 50
        with hub.open(f"s{i}", []) as stream:
            stream.start(0)
            for j, size in enumerate(sizes):
                stream.put([Rows(str(j), 0, torch.full((size, 1), (i + j) % 251, dtype=torch.uint8))])
            stream.finish(0)
            held: list[Rows] = []
            async with subscribe(source(address, f"s{i}"), "r", []) as messages:
                async for message in messages:
                    held += message.rows if isinstance(message, Chunk) else []
                    await asyncio.sleep(pause_s)
                    for rows in held:
                        assert bool((rows.tensor == (i + int(rows.name)) % 251).all())
            assert sum(rows.tensor.nbytes for rows in held) == sum(sizes)

    async with edge(directory, size_bytes=2 * MIB) as (hub, transport, address):
        for begin in range(0, 60, 12):
            tasks = [asyncio.create_task(one(hub, address, i)) for i in range(begin, begin + 12)]
            await asyncio.sleep(0.05)
            for task in tasks[::4]:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert [error for error in done if error and not isinstance(error, asyncio.CancelledError)] == []
        await until(lambda: transport.arena.used_bytes == 0)
        await hub.drain()
    assert sent_bytes("shared_memory") > shared


async def test_descriptors_mappings_and_memory_stay_flat(directory: Path):
    process, sent = psutil.Process(), tensors(4)

    async def one(hub: StreamHub, address: str, i: int) -> None:
        name = f"s{i}"
        with hub.open(name, ["big"]) as stream:
            stream.start(0)
            stream.put([Rows("big", 16 * j, tensor) for j, tensor in enumerate(sent)])
            stream.finish(64)
            async with subscribe(source(address, name), "r", []) as messages:
                async for message in messages:
                    if isinstance(message, Chunk) and i % 3 == 0:
                        break  # and away
        message = None

    def counts() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return process.num_fds(), maps.count(str(directory)), len(list(directory.iterdir()))

    async with edge(directory) as (hub, transport, address):
        for i in range(10):
            await one(hub, address, i)
        await hub.drain()
        before, memory = counts(), process.memory_info().rss
        for i in range(10, 310):
            await one(hub, address, i)
        await until(lambda: transport.arena.used_bytes == 0)
        await hub.drain()
        # until: what ran before this test may close its files still
        await until(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)))
        assert before[2] == 1
        assert process.memory_info().rss - memory < 32 * MIB
        await until(lambda: not [task for task in asyncio.all_tasks() if "CreditWriter" in repr(task)])
