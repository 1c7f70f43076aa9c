"""What every stage has, in this process: no message, however it is made, is more than it can refuse."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from quartet.v1 import server_info_pb2, stream_pb2, tensor_pb2, thinker_pb2, thinker_pb2_grpc
from services.common import stage as stage_module
from services.common.errors import InvalidInput
from services.common.rpc import channels, requests
from services.common.rpc.call import serve_call
from services.common.rpc.channels import Channels
from services.common.rpc.requests import MAX_ID_CHARACTERS, first_start, read_bytes
from services.common.rpc.settings import StageSettings
from services.common.stage import Stage
from services.common.stream import hub
from services.common.stream.consumer import ConsumerTransports, StreamConsumer
from services.thinker import delta_streams
from services.thinker.delta_streams import DeltaStreams
from tests.hostile import services
from tests.hostile.calls import TYPED, answer, honest
from tests.hostile.messages import MIB, attacks, methods
from tests.support.clock import until

GENERATE = "quartet.v1.ThinkerService/Generate"
CALLS = 16  # at a time, of one connection
SHARED = ("ServerInfoService", "ProfileService", "Health", "ServerReflection", "TensorStreamService")


class Thinker(thinker_pb2_grpc.ThinkerServiceServicer):
    """One that says nothing. A request may have a sound, and fails as it says in its `lora`."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._deltas = stage, DeltaStreams()

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[thinker_pb2.GenerateResponse]:
        start = await first_start(request_iterator, context)
        async with serve_call("thinker", start.request_id, context, self._stage.admission):
            if start.lora:
                raise InvalidInput(f"messages[{start.lora}]", f"begin {start.lora} end")
            for media in start.prompt.media:
                await read_bytes("media", media.size_bytes, request_iterator)
            yield thinker_pb2.GenerateResponse()

    async def StreamDeltas(self, request: Any, context: Any) -> AsyncIterator[thinker_pb2.StreamDeltasResponse]:
        async for message in self._deltas.serve(request.stream_id):
            yield message

    async def Detokenize(self, request: Any, context: Any) -> thinker_pb2.DetokenizeResponse:
        return thinker_pb2.DetokenizeResponse(text=str(len(request.token_ids)))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    places: dict[str, Any] = {"max_running_requests": CALLS // 4, "max_queued_requests": CALLS // 4}
    settings = StageSettings(model=str(tmp_path_factory.mktemp("model")), transports=["inline"], **places)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_module, "MAX_CALLS", CALLS)
        stage = Stage(settings, "thinker", "quartet.v1.ThinkerService")
    thinker_pb2_grpc.add_ThinkerServiceServicer_to_server(Thinker(stage), stage.grpc)

    async def start() -> server_info_pb2.GetServerInfoResponse:
        return stage.describe("float32", "cpu")

    serving = asyncio.create_task(stage.serve(start))
    while not stage.has_served:
        await asyncio.sleep(0.01)
    yield stage
    stage.request_stop()
    await serving


@pytest_asyncio.fixture(loop_scope="session")
async def channel(stage: Stage) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stage.port}") as opened:
        yield opened


def start(**fields: Any) -> bytes:
    whole = {"request_id": "r", **fields}
    return thinker_pb2.GenerateRequest(start=thinker_pb2.GenerateStart(**whole)).SerializeToString()


async def test_what_cannot_be_read_is_the_clients_fault(channel: grpc.aio.Channel):
    for name in services.RPCS:
        status, text = await answer(channel, name, [b"\xff\xff"])
        served = name.rpartition(".")[2].partition("/")[0] in (*SHARED, "ThinkerService")
        expected = "INVALID_ARGUMENT" if served else "UNIMPLEMENTED"
        assert status == expected, (name, status, text)
        assert (method := methods()[name].input_type.full_name) in text or not served, method
    for name in (name for name in services.RPCS if name.startswith("grpc.")):
        status, text = await answer(channel, name, [b"\x0a\x88\x27" + bytes(5000)])
        assert (status, "at most 4096" in text) == ("INVALID_ARGUMENT", True)
    assert (await answer(channel, GENERATE, [start()]))[0] == "OK"


async def test_what_all_stages_have_refuses_whatever_it_is_sent(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub, "CLAIM_TIMEOUT_S", 0.2)  # the stream of most of them is not there
    found = []
    for name in services.RPCS:
        if name.rpartition(".")[2].partition("/")[0] in SHARED:
            calls = [
                (what, answer(channel, name, [honest(name) + data]))
                for what, data in attacks(methods()[name].input_type)
            ]
            answers = await asyncio.gather(*(call for _, call in calls))
            found += [(name, what, got) for (what, _), got in zip(calls, answers, strict=True)]
    assert len(found) > 100
    assert not [each for each in found if each[2][0] not in TYPED or len(each[2][1]) > 1000]


async def test_a_stream_that_never_begins_ends(channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requests, "START_TIMEOUT_S", 0.05)
    assert await answer(channel, GENERATE, [], finishes=False) == ("DEADLINE_EXCEEDED", "no start came within 0.05 s")


async def test_a_peer_has_so_many_calls_at_a_time_and_no_more(stage: Stage, channel: grpc.aio.Channel):
    await channel.channel_ready()  # calls that wait for a connection begin in any order
    waiting = [channel.stream_stream(f"/{GENERATE}")() for _ in range(CALLS)]
    beyond = asyncio.create_task(answer(channel, GENERATE, [start()]))
    done, _ = await asyncio.wait({beyond}, timeout=0.5)
    assert not done
    async with channels.new_channel(f"127.0.0.1:{stage.port}", None) as other:  # by a connection of its own
        assert (await answer(other, GENERATE, [start()]))[0] == "OK"
    for call in waiting:
        call.cancel()
    assert (await beyond)[0] == "OK"


async def test_a_medium_that_never_ends_is_refused(channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requests, "MEDIA_TIMEOUT_S", 0.05)
    begun = start(prompt={"media": [{"size_bytes": 2**63}]})
    status, text = await answer(channel, GENERATE, [begun], finishes=False)
    assert (status, "no more of its bytes" in text) == ("INVALID_ARGUMENT", True)


async def test_an_id_is_kept_no_longer_than_it_may_be(stage: Stage, channel: grpc.aio.Channel):
    status, text = await answer(channel, GENERATE, [start(request_id="x" * MIB)])
    assert (status, "request_id" in text) == ("INVALID_ARGUMENT", True)

    def kept() -> list[int]:
        return [len(span.request_id) for span in stage.admission.spans.ended() if span.request_id.startswith("x")]

    await until(kept)  # the answer may be here before the span has ended
    assert kept() == [MAX_ID_CHARACTERS]


@pytest.mark.parametrize("text", ["x" * MIB, "\u20ac" * (MIB // 3), "\U0001f600" * 10_000])
async def test_a_long_refusal_arrives(channel: grpc.aio.Channel, text: str):
    status, said = await answer(channel, GENERATE, [start(lora=text)])
    assert status == "INVALID_ARGUMENT"
    assert (said.startswith("messages["), said.endswith(" end"), len(said) < 1000) == (True, True, True)


async def test_streams_of_deltas_are_so_many_and_no_more(channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(delta_streams, "MOST_OPEN", 2)
    stub = thinker_pb2_grpc.ThinkerServiceStub(channel)
    calls = []
    try:
        for name in ("a", "b"):
            calls.append(stub.StreamDeltas(thinker_pb2.StreamDeltasRequest(stream_id=name)))
            await calls[-1].read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.StreamDeltas(thinker_pb2.StreamDeltasRequest(stream_id="c")).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        for call in calls:
            call.cancel()


async def test_channels_to_addresses_that_clients_name_are_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channels, "MAX_CHANNELS", 3)
    opened = Channels()
    first = opened.channel("127.0.0.1:1")
    for port in range(2, 6):
        opened.channel(f"127.0.0.1:{port}")
    assert opened.channel("127.0.0.1:5") is opened.channel("127.0.0.1:5")
    assert opened.channel("127.0.0.1:1") is not first
    assert len(opened._open) == 3
    await opened.close_all()


def chunk(**tensor: Any) -> bytes:
    whole = {"dtype": tensor_pb2.DATA_TYPE_INT32, "shape": [1, 16], **tensor}
    rows = [stream_pb2.Rows(name="codes", tensor=tensor_pb2.Tensor(**whole))]
    return stream_pb2.SubscribeResponse(chunk=stream_pb2.StreamChunk(rows=rows)).SerializeToString()


ARENA = {"offset_bytes": 0, "size_bytes": 64, "lease_id": 1}
PRODUCED = {
    "what cannot be read": (b"\xff" * 10, "cannot be read"),
    "millions of rows": (b"\x12" + b"\x80\x89\x7a" + b"\x0a\x00" * 1_000_000, "more than"),
    "a path as an arena": (chunk(shared_memory={**ARENA, "arena": "../../etc/passwd"}), "arena"),
    "an arena that is not there": (chunk(shared_memory={**ARENA, "arena": "quartet-" + "0" * 32}), "arena"),
    "an unoffered UCX": (chunk(ucx={"tag": 1, "size_bytes": 64}), "not offered"),
    "a shape that lies": (chunk(shape=[2**62, 2**62, 16], inline=bytes(64)), "codes"),
    "many dimensions": (chunk(shape=[1] * 1000, inline=bytes(4)), "dimensions"),
    "a negative shape": (chunk(shape=[-1, -1], inline=bytes(4)), "negative"),
}


@pytest.mark.parametrize("what", PRODUCED)
async def test_a_producer_that_a_client_names_can_send_anything(tmp_path: Path, what: str):
    sent, named = PRODUCED[what]

    async def subscribe(request_iterator: Any, context: Any) -> AsyncIterator[bytes]:
        await anext(request_iterator)
        yield stream_pb2.SubscribeResponse(header=stream_pb2.StreamHeader(prompt_positions=0)).SerializeToString()
        yield sent

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(subscribe)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("quartet.v1.TensorStreamService", {"Subscribe": handler})]
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    consumer = StreamConsumer(Channels(), ConsumerTransports(["inline", "shared_memory"], tmp_path))
    source = stream_pb2.StreamSource(address=address, stream_id="s")
    try:
        with pytest.raises(InvalidInput, match=named):
            await _read(consumer, source)
    finally:
        await consumer.channels.close_all()
        await server.stop(None)


async def _read(consumer: StreamConsumer, source: stream_pb2.StreamSource) -> None:
    async with consumer.subscribe(source, "r", []) as messages:
        async for _ in messages:
            pass
