"""How the gateway judges a stage's health: late is not dead."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.pipeline.config import ThinkerStage
from gateway.pipeline.replica import LATE_CHECKS
from gateway.pipeline.stage import Stage
from quartet.v1 import server_info_pb2, server_info_pb2_grpc
from services.common.rpc import channels
from tests.support.stage.streaming import CHANNELS


class LateHealth(health_pb2_grpc.HealthServicer):
    """Says SERVING, after `delay_s` seconds."""

    delay_s = 0.0

    async def Check(self, request, context):
        await asyncio.sleep(self.delay_s)
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class Info(server_info_pb2_grpc.ServerInfoServiceServicer):
    async def GetServerInfo(self, request, context):
        return server_info_pb2.GetServerInfoResponse(stage="thinker")

    async def GetLoad(self, request, context):
        return server_info_pb2.GetLoadResponse()


@pytest.fixture
async def served():
    health, server = LateHealth(), grpc.aio.server(options=channels.SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    server_info_pb2_grpc.add_ServerInfoServiceServicer_to_server(Info(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield health, server, Stage("thinker", ThinkerStage(kind="thinker", address=f"127.0.0.1:{port}"))
    await server.stop(None)
    await CHANNELS.close_all()


async def test_a_stage_that_answers_late_serves_on_until_it_is_late_too_often(served):
    health, _, stage = served
    await stage.check(60)
    assert stage.serving
    health.delay_s = 3600.0
    for _ in range(LATE_CHECKS - 1):
        await stage.check(0.1)
        assert stage.serving
    await stage.check(0.1)
    assert not stage.serving
    health.delay_s = 0.0
    await stage.check(60)
    assert stage.serving
    health.delay_s = 3600.0
    await stage.check(0.1)
    assert stage.serving  # counted anew


async def test_a_stage_that_is_gone_is_down_at_once(served):
    _, server, stage = served
    await stage.check(60)
    await server.stop(None)
    await stage.check(60)
    assert not stage.serving
