"""Channel options, on a real server: gRPC ignores an option that it does not know, and says nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.rpc import channels
from tests.support.stage.streaming import CHANNELS

FASTER = 50  # times
IDLE_S = 5.0  # gRPC sends one ping a second at most, and a server bears three that come too early
ONE_WAY_S = 1.0


def faster(options):
    """`options` with pings that come sooner after each other, and may; their answers may be late."""
    patient = dict(options) | {"grpc.keepalive_timeout_ms": 60_000}
    return [
        (name, value // FASTER if "time_ms" in name or "interval" in name else value) for name, value in patient.items()
    ]


@asynccontextmanager
async def serving(options) -> AsyncIterator[int]:
    """A server; its port."""
    server, servicer = grpc.aio.server(options=options), health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await CHANNELS.close_all()
        await server.stop(None)


@asynccontextmanager
async def far(port: int) -> AsyncIterator[int]:
    """Another port, from which bytes take ONE_WAY_S to `port` and as long back."""
    loop, relays = asyncio.get_running_loop(), []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            loop.call_later(ONE_WAY_S, writer.write, data)
        loop.call_later(ONE_WAY_S, writer.close)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.append(asyncio.current_task())
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, there_writer), carry(there_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await CHANNELS.close_all()
        await asyncio.wait(relays, timeout=10)


async def test_a_stream_that_is_idle_for_long_is_not_taken_for_abuse(monkeypatch, real_options):
    monkeypatch.setattr(channels, "CLIENT_OPTIONS", faster(channels.CLIENT_OPTIONS))
    async with serving(faster(channels.SERVER_OPTIONS)) as port:
        watch = health_pb2_grpc.HealthStub(CHANNELS.channel(f"127.0.0.1:{port}")).Watch(health_pb2.HealthCheckRequest())  # pyright: ignore[reportAttributeAccessIssue]
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(TimeoutError):  # nothing but pings; a connection that is closed raises AioRpcError
            async with asyncio.timeout(IDLE_S):
                await watch.read()


async def test_a_far_peer_is_reached(real_options):
    async with serving(channels.SERVER_OPTIONS) as port, far(port) as far_port:
        check = health_pb2_grpc.HealthStub(CHANNELS.channel(f"127.0.0.1:{far_port}")).Check  # pyright: ignore[reportAttributeAccessIssue]
        answer = await check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
