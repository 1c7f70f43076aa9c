"""A stage's profiles: what they record, what ends them, and what is refused. Real torch, a real server."""

import asyncio
import contextlib
import gzip
import json
import mmap
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from quartet.v1 import profile_pb2, profile_pb2_grpc
from services.common import profiles
from services.common.stage import Stage
from services.common.telemetry.spans import MAX_KEPT, Span, Spans
from tests.pure.test_stage import serving, settings


@contextlib.contextmanager
def an_engine() -> Iterator[None]:
    """A thread that computes."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.001):
            torch.tanh(torch.ones(4))

    thread = threading.Thread(target=work, name="an-engine")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.asynccontextmanager
async def profiled() -> AsyncIterator[tuple[Stage, profile_pb2_grpc.ProfileServiceStub]]:
    async with (
        serving("talker", settings()) as stage,
        grpc.aio.insecure_channel(f"127.0.0.1:{stage.port}") as channel,
    ):
        yield stage, profile_pb2_grpc.ProfileServiceStub(channel)


async def stop(stub: profile_pb2_grpc.ProfileServiceStub) -> tuple[profile_pb2.Profile, dict[str, Any]]:
    """(summary, trace)."""
    profile, data = profile_pb2.Profile(), b""
    async for message in stub.StopProfile(profile_pb2.StopProfileRequest()):
        profile = message.profile if message.HasField("profile") else profile
        data += message.data
    return profile, json.loads(gzip.decompress(data)) if data else {}


async def start(stub: profile_pb2_grpc.ProfileServiceStub, seconds: float = 0) -> float:
    return (await stub.StartProfile(profile_pb2.StartProfileRequest(seconds=seconds))).seconds


async def refused(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


async def test_it_records_a_thread_that_was_there_before():
    with an_engine():
        async with profiled() as (stage, stub):
            assert await start(stub) == 60
            assert await refused(start(stub)) is grpc.StatusCode.ALREADY_EXISTS
            with stage.admission.spans.serving(lambda: Span("r", "talker", 1.0)):
                await asyncio.sleep(0.1)
                profile, trace = await stop(stub)
            tanhs = [event for event in trace["traceEvents"] if event["name"] == "aten::tanh"]
            assert {profile.threads[event["tid"]] for event in tanhs} == {"an-engine"}
            at = int(trace["baseTimeNanoseconds"]) + tanhs[0]["ts"] * 1000
            assert profile.start_unix_ns < at < profile.end_unix_ns
            assert [(span.request_id, span.HasField("end_unix_ns")) for span in profile.spans] == [("r", False)]
            assert await refused(stop(stub)) is grpc.StatusCode.NOT_FOUND  # it was fetched
            await start(stub)
            assert (await stop(stub))[1]["traceEvents"]  # another one works as well


async def test_it_ends_by_itself_and_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(profiles, "MAX_MIB", 8)
    async with profiled() as (stage, stub):
        assert await start(stub, 0.01) == 0.01
        while stage.profiles._running:
            await asyncio.sleep(0.01)
        assert (await stop(stub))[0].ended_by == "its limit of 0.01 s"
        await start(stub)
        # not of the heap, which may have so much that was freed
        taken = mmap.mmap(-1, 256 * 1024 * 1024, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        taken.write(bytes(1) * len(taken))
        while stage.profiles._running:
            await asyncio.sleep(0.01)
        assert "memory" in (await stop(stub))[0].ended_by
        del taken
        monkeypatch.setattr(profiles, "KEEP_S", 0.0)
        await start(stub, 0.01)
        while stage.profiles._running or stage.profiles._turn.locked() or stage.profiles._recorded:
            await asyncio.sleep(0.01)
        assert await refused(stop(stub)) is grpc.StatusCode.NOT_FOUND


async def test_what_is_refused():
    async with profiled() as (_, stub):
        for seconds in (-1, 60.1, float("nan")):
            assert await refused(start(stub, seconds)) is grpc.StatusCode.INVALID_ARGUMENT
        assert await refused(stop(stub)) is grpc.StatusCode.NOT_FOUND


async def test_one_that_is_fetched_outlives_the_next_start():
    class Large:
        """A recorder of two processes, whose traces no transport buffers whole."""

        async def start(self) -> None: ...

        async def stop(self, directory: Path) -> list[tuple[str, Path]]:
            for name in "ab":
                (directory / name).write_bytes(bytes(16 * 1024 * 1024))
            return [(name, directory / name) for name in "ab"]

    async with profiled() as (stage, stub):
        stage.profiles.recorder = Large()
        await start(stub)
        messages = aiter(stub.StopProfile(profile_pb2.StopProfileRequest()))
        assert (await anext(messages)).HasField("profile")
        await start(stub)
        assert sum([len(message.data) async for message in messages]) == 2 * 16 * 1024 * 1024


async def test_a_start_whose_caller_is_gone_is_one_that_ends(tmp_path: Path):
    class Slow:
        """A recorder whose start takes until it is let go on."""

        go_on = asyncio.Event()

        async def start(self) -> None:
            await self.go_on.wait()

        async def stop(self, directory: Path) -> list[tuple[str, Path]]:
            raise OSError("its disk is full")

    async with profiled() as (stage, stub):
        stage.profiles.recorder = recorder = Slow()
        call = stub.StartProfile(profile_pb2.StartProfileRequest(seconds=0.05))
        while stage.profiles._running is None:
            await asyncio.sleep(0.01)
        call.cancel()
        recorder.go_on.set()
        while stage.profiles._running:
            await asyncio.sleep(0.01)
        profile, trace = await stop(stub)
        assert (profile.ended_by, trace) == ("its limit of 0.05 s", {})
        assert profile.missing.startswith("recording failed")  # its spans are there all the same


def test_spans_are_few_and_found_by_their_request():
    spans = Spans()
    for i in range(MAX_KEPT + 5):
        with spans.serving(lambda i=i: Span(f"r{i}", "talker", float(i), i + 1.0, "OK")):
            assert len(spans.served()) == 1
    assert [len(spans.ended()), spans.served()] == [MAX_KEPT, []]
    assert [spans.find("r4"), spans.find("")] == [[], []]
    for name in ("a.b", "a.b-0", "a.b-11", "a.b-x", "axb", "a.b-1-2"):
        spans.add(Span(name, "talker", 0.0, 1.0))
    assert [span.request_id for span in spans.find("a.b")] == ["a.b", "a.b-0", "a.b-11"]
