"""A stage's process as its operator sees it: health, reflection, drain, refusal of a port that is taken."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from quartet.v1 import (
    code2wav_pb2,
    code2wav_pb2_grpc,
    server_info_pb2,
    server_info_pb2_grpc,
    stream_pb2,
    stream_pb2_grpc,
)
from services.common.stream.hub import StreamHub, TensorStreamServicer
from services.common.stream.rows import Rows
from services.common.stream.tensors import to_message
from tests.support.deployment.health_command import healthy
from tests.support.stage.shm import arena_directory
from tests.support.systems.stack import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")
SERVICE = "quartet.v1.Code2WavService"
START_TIMEOUT_S = 150
GUARD_S = 60


def command(checkpoint: Path, port: int, *flags: str) -> list[str]:
    return [sys.executable, "-m", "services.code2wav", "--model", str(checkpoint), "--port", str(port), *flags]


@contextlib.asynccontextmanager
async def code2wav(checkpoint: Path, *flags: str) -> AsyncIterator[tuple[subprocess.Popen, grpc.aio.Channel, str]]:
    port = free_port()
    process = subprocess.Popen(command(checkpoint, port, *flags), stderr=subprocess.PIPE, text=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while await health(channel, SERVICE) != "SERVING":
                    assert process.stderr
                    assert process.poll() is None, process.stderr.read()
                    await asyncio.sleep(0.1)
            yield process, channel, f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.communicate()


async def health(channel: grpc.aio.Channel, service: str) -> str:
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))  # pyright: ignore[reportAttributeAccessIssue]
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def test_drain_finishes_what_is_in_flight_and_refuses_the_rest(tiny_checkpoint: Path):
    hub, producer = StreamHub(), grpc.aio.server()
    stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(hub, "test"), producer)
    source = stream_pb2.StreamSource(
        address=f"127.0.0.1:{producer.add_insecure_port('127.0.0.1:0')}", stream_id="frames"
    )
    await producer.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(producer.stop, None)
        checks = free_port()
        process, channel, _ = await stack.enter_async_context(code2wav(tiny_checkpoint, f"--metrics-port={checks}"))
        assert await asyncio.to_thread(healthy, checks, "/ready") == (0, "")
        stub = code2wav_pb2_grpc.Code2WavServiceStub(channel)
        info = await server_info_pb2_grpc.ServerInfoServiceStub(channel).GetServerInfo(
            server_info_pb2.GetServerInfoRequest()
        )
        frame = torch.zeros(1, info.code2wav.num_code_groups, dtype=torch.int32)
        with hub.open("frames", ["codes"]) as stream:
            decoding = aiter(stub.Decode(code2wav_pb2.DecodeRequest(request_id="r", source=source)))
            await stream.subscription(GUARD_S)
            stream.start(0)
            stream.put([Rows("codes", 0, frame)])
            first = await anext(decoding)
            assert first.audio.frames == 1
            load = await server_info_pb2_grpc.ServerInfoServiceStub(channel).GetLoad(server_info_pb2.GetLoadRequest())
            assert (load.running, load.queued) == (1, 0)
            assert info.config_digest
            assert info.checkpoint_digest

            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(GUARD_S):
                while await health(channel, SERVICE) != "NOT_SERVING":
                    await asyncio.sleep(0.02)
            assert await health(channel, "") == "SERVING"
            assert await asyncio.to_thread(healthy, checks, "/ready") == (1, "/ready: 503 NOT_SERVING")
            assert await asyncio.to_thread(healthy, checks, "/health") == (0, "")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Decode(code2wav_pb2.DecodeRequest(request_id="late", codes=to_message(frame))).read()
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "draining" in (refused.value.details() or "")

            stream.put([Rows("codes", 1, frame)])
            stream.finish(2)
            messages = [message async for message in decoding]
        assert messages[-1].summary.frames == 2
        assert await asyncio.to_thread(process.wait, GUARD_S) == 0


@pytest.mark.long
async def test_an_arena_goes_with_its_process_or_with_the_next_one(tiny_checkpoint: Path):
    with arena_directory() as directory:
        flags = [f"--shared-memory-dir={directory}", "--shared-memory-mib=8"]
        async with code2wav(tiny_checkpoint, *flags) as (process, _, _):
            (killed,) = directory.iterdir()
            process.kill()
            process.wait()
        assert killed.exists()
        async with code2wav(tiny_checkpoint, *flags) as (process, _, _):
            (arena,) = directory.iterdir()  # the other one was removed
            assert arena.stat().st_size == 8 * 2**20
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, GUARD_S) == 0
        loading = subprocess.Popen(command(tiny_checkpoint, free_port(), *flags), stderr=subprocess.DEVNULL)
        async with asyncio.timeout(START_TIMEOUT_S):
            while not list(directory.iterdir()):
                await asyncio.sleep(0.005)
        loading.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(loading.wait, GUARD_S) == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(tiny_checkpoint: Path) -> AsyncIterator[str]:
    """Of a stage that serves, for tests that leave it as it is."""
    async with code2wav(tiny_checkpoint) as (_, _, address):
        yield address


async def test_reflection_lists_the_services(address: str):
    with grpc.insecure_channel(address) as channel:
        services = await asyncio.to_thread(lambda: set(ProtoReflectionDescriptorDatabase(channel).get_services()))
    assert services >= {SERVICE, "quartet.v1.ServerInfoService", "grpc.health.v1.Health"}


async def test_a_port_in_use_is_an_error(tiny_checkpoint: Path, address: str):
    port = int(address.rpartition(":")[2])
    second = await asyncio.to_thread(
        subprocess.run, command(tiny_checkpoint, port), capture_output=True, text=True, timeout=START_TIMEOUT_S
    )
    assert second.returncode != 0
    assert str(port) in second.stderr
