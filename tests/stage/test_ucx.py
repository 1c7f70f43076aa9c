"""Tensors by UCX: what arrives, what becomes of those who leave or die, and of what nobody waits for."""

import asyncio
import contextlib
import gc
import json
import random
import signal
import subprocess
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from structlog.testing import capture_logs

from services.common.errors import StageError, Unavailable
from services.common.stream import ucx
from services.common.stream.hub import StreamHub
from services.common.stream.output_stream import OutputStream
from services.common.stream.rows import Chunk, Rows
from services.common.stream.ucx import UcxTransport, open_ucx
from services.common.stream.ucx_worker import UcxWorker
from services.talker.config import TalkerSettings
from tests.support.clock import until
from tests.support.stage.shm import MIB, MIN_BYTES, metric, peer, read_all, same, serving, source, tensors
from tests.support.stage.streaming import CHANNELS, reading, subscribe
from tests.support.stage.ucx import ARENAS, connected, edge, working

pytestmark = pytest.mark.skipif(not find_spec("ucxx"), reason="needs ucxx: pip install 'quartet[ucx]'")
GUARD_S = 120


def sent_bytes(transport: str) -> float:
    return metric("stream_bytes_total", consumer="other", rows="big", transport=transport)


async def test_large_tensors_arrive_to_the_bit_and_small_ones_go_inline():
    sent, small = tensors(6), torch.arange(8)
    before, inline = sent_bytes("ucx"), sent_bytes("inline")
    async with edge() as e:
        with e.hub.open("s", ["big"]) as stream:
            stream.start(0)
            stream.put([Rows(f"big{i}", 0, tensor) for i, tensor in enumerate(sent)])
            stream.put([Rows("big", 0, sent[0]), Rows("big", 16, small)])
            stream.finish(24)
            async with subscribe(source(e.address), "r", []) as messages:
                got = {}
                async for message in messages:
                    if isinstance(message, Chunk):
                        got |= {(rows.name, rows.first_position): rows.tensor for rows in message.rows}
    for i, tensor in enumerate(sent):
        assert same(got[f"big{i}", 0], tensor), i
    assert same(got["big", 0], sent[0])
    assert torch.equal(got["big", 16], small)
    assert sent_bytes("ucx") - before == sent[0].nbytes
    assert sent_bytes("inline") - inline == small.nbytes


async def test_many_streams_some_of_them_left():
    order = random.Random(3)

    async def one(e, i: int) -> None:
        with e.hub.open(f"s{i}", []) as stream:
            stream.start(0)
            sizes = [order.randrange(70_000, MIB) for _ in range(5)]
            for j, size in enumerate(sizes):
                stream.put([Rows(str(j), 0, torch.full((1, size), (i + j) % 251, dtype=torch.uint8))])
            stream.finish(5)
            got = 0
            async with subscribe(source(e.address, f"s{i}"), "r", []) as messages:
                async for message in messages:
                    if isinstance(message, Chunk):
                        rows = message.rows[0]
                        assert bool((rows.tensor == (i + int(rows.name)) % 251).all())
                        got += rows.tensor.nbytes
                        if i % 4 == 1:
                            raise Unavailable("of the consumer")
            assert got == sum(sizes)

    async with edge() as e:
        tasks = [asyncio.create_task(one(e, i)) for i in range(40)]
        await asyncio.sleep(0.02)
        for task in tasks[::4]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        wrong = [each for each in done if each and not isinstance(each, (Unavailable, asyncio.CancelledError))]
        assert not wrong
        await e.hub.drain()
        await until(lambda: not e.producer._running and not e.consumer._running)  # what nobody took was refused


@contextlib.asynccontextmanager
async def consumed() -> AsyncIterator[tuple[StreamHub, UcxWorker, OutputStream, subprocess.Popen]]:
    """(hub, its worker, a stream of it, a process that has subscribed to it and can be sent to)."""
    with working() as worker:
        async with serving(UcxTransport(worker, MIN_BYTES)) as (hub, address):
            with hub.open("s", ["states"]) as stream:
                stream.start(0)
                with peer("consume", address, "s", script="ucx") as (process, _):
                    await stream.subscription(60)
                    await connected(worker)
                    yield hub, worker, stream, process


def eight() -> list[Rows]:
    """Tensors of 1 MiB."""
    return [Rows("states", i, torch.zeros(1, MIB, dtype=torch.uint8)) for i in range(8)]


async def test_a_consumer_that_dies_frees_what_was_on_its_way():
    async with consumed() as (hub, worker, stream, process):
        stream.put(eight())
        assert process.stdout
        assert json.loads(await asyncio.to_thread(process.stdout.readline)) == {"got": MIB}
        await until(lambda: len(worker._running) == 7)  # of the eight: it takes no other
        process.kill()
        await until(lambda: stream.consumer_gone and not worker._running)
        await hub.drain()


async def test_a_consumer_that_hangs_is_dropped(monkeypatch):
    monkeypatch.setattr(ucx, "HUNG_S", 0.5)
    async with consumed() as (_, worker, stream, process):
        process.send_signal(signal.SIGSTOP)
        stream.put(eight())
        await until(lambda: len(worker._running) == 8)
        with capture_logs() as told:
            stream.consumer_left()  # as when gRPC's keepalive has noticed
            await until(lambda: not worker._running)
        assert [line["event"] for line in told] == ["UCX peer takes nothing: dropped"]


async def test_a_producer_that_dies_is_a_typed_error_at_once():
    with working() as worker, reading(ARENAS, ucx=worker):
        with peer("produce", script="ucx") as (process, said):
            async with subscribe(source(said["address"]), "r", []) as messages:
                for _ in range(4):  # the header, three tensors
                    await anext(messages)
                process.kill()
                # by the connection's end: UCX itself would not notice
                with pytest.raises(Unavailable):
                    async with asyncio.timeout(GUARD_S):
                        await read_all(messages)
        await CHANNELS.close_all()
        await until(lambda: not worker._running)


async def test_a_lost_connection_breaks_the_stream_and_the_next_one_connects_again():
    sent = tensors(4)
    async with edge() as e:
        with e.hub.open("s", ["big"]) as stream:
            stream.start(0)
            async with subscribe(source(e.address), "r", []) as messages:
                await anext(messages)
                stream.put([Rows("big", 0, sent[0])])
                await anext(messages)
                e.producer.drop(e.producer.peer(e.consumer.address))
                stream.put([Rows("big", 16, sent[1]), Rows("big", 32, sent[2])])  # one of them was on its way, or none
                stream.finish(48)
                broken = False
                try:
                    await asyncio.wait_for(read_all(messages), GUARD_S)
                except StageError as error:
                    broken = isinstance(error, Unavailable)
                    assert broken
        await until(lambda: not e.producer._running and not e.consumer._running)
        await e.connected()
        before = sent_bytes("ucx")
        with e.hub.open("again", ["big"]) as stream:
            stream.start(0)
            stream.put([Rows("big", 0, sent[3])])
            stream.finish(16)
            async with subscribe(source(e.address, "again"), "r", []) as messages:
                assert same((await read_all(messages))["big"], sent[3])
        assert sent_bytes("ucx") - before == sent[3].nbytes


@pytest.mark.parametrize("reason", ["not_offered", "unreachable"])
async def test_who_cannot_be_reached_gets_messages(reason: str):
    sent = tensors(1)[0]
    before = metric("stream_fallback_bytes_total", transport="ucx", reason=reason)
    with working() as gone:
        pass
    with working() as worker:
        async with serving(UcxTransport(worker, MIN_BYTES)) as (hub, address):
            consumer = None if reason == "not_offered" else gone
            with reading(ARENAS, ucx=consumer), capture_logs() as told, hub.open("s", ["big"]) as stream:
                stream.start(0)
                async with subscribe(source(address), "r", []) as messages:
                    await anext(messages)
                    if reason == "unreachable":
                        await until(lambda: not worker._peers)  # it has tried to connect
                    stream.put([Rows("big", 0, sent)])
                    stream.finish(16)
                    assert same((await read_all(messages))["big"], sent)
    assert metric("stream_fallback_bytes_total", transport="ucx", reason=reason) - before == sent.nbytes
    (line,) = told
    assert (line["event"], line["transport"], line["ucx_reason"]) == ("edge", "inline", reason)


def test_without_ucxx_there_is_a_line_and_no_worker(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ucxx._lib.libucxx", None)
    with capture_logs() as told:
        assert open_ucx(TalkerSettings(model="m", transports=["inline", "ucx"])) is None
    assert [line["event"] for line in told] == ["no UCX: tensors go inline; pip install 'quartet[ucx]'"]
    assert open_ucx(TalkerSettings(model="m")) is None


def test_ucx_and_tls_do_not_go_together(tmp_path: Path):
    file = tmp_path / "pem"
    with pytest.raises(ValueError, match="neither encrypts"):
        TalkerSettings(model="m", transports=["inline", "ucx"], tls_cert=file, tls_key=file, tls_ca=file)


async def test_descriptors_and_memory_stay_flat():
    process, sent = psutil.Process(), tensors(4)

    async def one(e, i: int) -> None:
        with e.hub.open(f"s{i}", ["big"]) as stream:
            stream.start(0)
            stream.put([Rows("big", 16 * j, tensor) for j, tensor in enumerate(sent)])
            stream.finish(64)
            async with subscribe(source(e.address, f"s{i}"), "r", []) as messages:
                async for message in messages:
                    if isinstance(message, Chunk) and i % 3 == 0:
                        break  # and away
        message = None

    async with edge() as e:
        for i in range(20):
            await one(e, i)
        await e.hub.drain()
        gc.collect()
        before, memory = process.num_fds(), process.memory_info().rss
        for i in range(20, 320):
            await one(e, i)
        await e.hub.drain()
        await until(lambda: not e.producer._running and not e.consumer._running)
        gc.collect()
        await until(lambda: process.num_fds() <= before)  # what ran before this test may close its files still
        assert process.memory_info().rss - memory < 32 * MIB


def test_a_closed_worker_says_so():
    with working() as worker, working() as other:
        peer_of = worker.peer(other.address)
        worker.close()
        with pytest.raises(Unavailable):
            worker.send(peer_of, np.zeros(4, np.uint8), 2**30).result(GUARD_S)
        tag = worker.open_tags()
        worker.close_tags(tag)
        with pytest.raises(Unavailable):
            worker.receive(tag, 4).result(GUARD_S)


async def test_a_stream_waits_for_what_is_on_its_way():
    """The call ends when the consumer has it all, not when all is announced."""
    async with edge() as e:
        assert isinstance(e.hub, StreamHub)
        with e.hub.open("s", ["big"]) as stream:
            stream.start(0)
            stream.put([Rows("big", 0, tensors(1)[0])])
            stream.finish(16)
            async with subscribe(source(e.address), "r", []) as messages:
                await anext(messages)
                await asyncio.sleep(0.2)
                assert not stream.consumer_gone
                await read_all(messages)
            await until(lambda: stream.consumer_gone)
