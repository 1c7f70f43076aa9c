"""Metrics that every stage has: what is inside, what was refused, what its streams carry."""

import asyncio

import grpc
import pytest
import torch
from prometheus_client import REGISTRY

from quartet.v1 import stream_pb2, stream_pb2_grpc
from services.common.errors import QueueFull, Unavailable
from services.common.rpc import channels
from services.common.rpc.call import Admission
from services.common.stream import hub as hub_module
from services.common.stream import output_stream
from services.common.stream.consumer import CREDITS
from services.common.stream.hub import StreamHub, TensorStreamServicer
from services.common.stream.rows import Chunk, Rows
from tests.support.stage.streaming import subscribe


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"quartet_{name}", labels) or 0.0


async def test_admission_counts_running_queued_and_refused():
    admission = Admission(max_running=1, max_queued=1, stage="a-stage")

    def load() -> tuple[float, float]:
        return value("requests_running", stage="a-stage"), value("requests_queued", stage="a-stage")

    def refused(reason: str) -> float:
        return value("requests_refused_total", stage="a-stage", reason=reason)

    with pytest.raises(Unavailable), admission.admit():
        pass
    assert (refused("not_serving"), load()) == (1, (0, 0))
    admission.open()
    with admission.admit():
        assert load() == (1, 0)
        with admission.admit():
            assert load() == (1, 1)
            with pytest.raises(QueueFull), admission.admit():
                pass
    assert (refused("queue_full"), refused("not_serving"), load()) == (1, 1, (0, 0))


class Clock:
    """A time that passes when the test says so."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


async def test_a_stream_counts_bytes_chunks_and_credits(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(output_stream, "time", clock)
    monkeypatch.setattr(hub_module, "time", clock)
    server, hub = grpc.aio.server(options=channels.SERVER_OPTIONS), StreamHub()
    stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(hub, "b-stage"), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    edge = {"stage": "b-stage", "consumer": "other", "transport": "inline"}
    tensor = torch.zeros(4, 8)
    source = stream_pb2.StreamSource(address=f"127.0.0.1:{port}", stream_id="s")
    try:
        with hub.open("s", ["known"]) as output:
            output.start(prompt_positions=0)
            output.put([Rows("known", 0, tensor)])
            clock.now_s = 0.2  # it waits for its consumer
            async with subscribe(source, "r", []) as messages:
                assert isinstance(await anext(messages), stream_pb2.StreamHeader)
                chunk = await anext(messages)
                assert isinstance(chunk, Chunk)
                assert len(chunk.rows) == 1
                output.put([Rows("known", 4, tensor)])
                await anext(messages)
                await asyncio.sleep(0.1)
                assert value("stream_credits_outstanding", stage="b-stage") == CREDITS - 2
                output.finish(8)
                assert isinstance(await anext(messages), stream_pb2.StreamEnd)
    finally:
        await server.stop(grace=None)
    assert value("stream_bytes_total", rows="known", **edge) == 2 * 4 * 8 * 4
    assert value("stream_chunk_seconds_count", **edge) == 2
    assert value("stream_chunk_seconds_bucket", le="0.1", **edge) == 1  # the second one did not wait
    assert value("stream_chunk_seconds_sum", **edge) == pytest.approx(0.2)
    async with asyncio.timeout(60):  # a stopped server does not wait for what its calls do last
        while value("stream_credits_outstanding", stage="b-stage"):
            await asyncio.sleep(0.01)
