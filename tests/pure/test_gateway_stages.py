"""How the gateway judges a stage's health: late is not dead."""

import asyncio

import grpc
import pytest

from gateway.pipeline.config import ThinkerStage
from gateway.pipeline.replica_health import LATE_CHECKS
from gateway.pipeline.stage import Stage
from quartet.v1 import server_info_pb2, server_info_pb2_grpc
from services.common.rpc import channels
from tests.support.stage.streaming import CHANNELS


class LateInfo(server_info_pb2_grpc.ServerInfoServiceServicer):
    """Reports that it serves, after `delay_s` seconds."""

    delay_s = 0.0

    async def GetServerInfo(self, request, context):
        return server_info_pb2.GetServerInfoResponse(stage="thinker")

    async def GetLoad(self, request, context):
        await asyncio.sleep(self.delay_s)
        return server_info_pb2.GetLoadResponse(serving=True)


@pytest.fixture
async def served():
    info, server = LateInfo(), grpc.aio.server(options=channels.SERVER_OPTIONS)
    server_info_pb2_grpc.add_ServerInfoServiceServicer_to_server(info, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield info, server, Stage("thinker", ThinkerStage(kind="thinker", address=f"127.0.0.1:{port}"))
    await server.stop(None)
    await CHANNELS.close_all()


async def test_a_stage_that_answers_late_serves_on_until_it_is_late_too_often(served):
    info, _, stage = served
    await stage.check(60)
    assert stage.serving
    info.delay_s = 3600.0
    for _ in range(LATE_CHECKS - 1):
        await stage.check(0.1)
        assert stage.serving
    await stage.check(0.1)
    assert not stage.serving
    info.delay_s = 0.0
    await stage.check(60)
    assert stage.serving
    info.delay_s = 3600.0
    await stage.check(0.1)
    assert stage.serving  # counted anew


async def test_a_stage_that_is_gone_is_down_at_once(served):
    _, server, stage = served
    await stage.check(60)
    await server.stop(None)
    await stage.check(60)
    assert not stage.serving
