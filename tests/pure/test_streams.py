"""A producer's stream as its consumer sees it, over a real gRPC server on loopback."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest
import torch

from quartet.v1 import stream_pb2, stream_pb2_grpc, tensor_pb2
from services.common.errors import AlreadyExists, InvalidInput, QueueFull, RequestCancelled, StageLost
from services.common.rpc import channels
from services.common.stream.consumer import CREDITS
from services.common.stream.hub import StreamHub, TensorStreamServicer
from services.common.stream.output_stream import OutputStream
from services.common.stream.rows import Chunk, Rows
from services.common.stream.tensors import to_message, to_torch
from tests.support.clock import until
from tests.support.stage.streaming import CHANNELS, subscribe

GUARD_S = 60.0


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[StreamHub, str, grpc.aio.Server]]:
    hub, server = StreamHub(), grpc.aio.server(options=channels.SERVER_OPTIONS)
    stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(hub, "test"), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield hub, address, server
    finally:
        await server.stop(None)
        await CHANNELS.close_all()


def source(address: str, stream_id: str = "s") -> stream_pb2.StreamSource:
    return stream_pb2.StreamSource(address=address, stream_id=stream_id)


async def collect(messages: AsyncIterator) -> tuple[int, dict[str, dict[int, list]], int]:
    """(prompt positions, name -> position -> row, end position)"""
    prompt, end, by_name = -1, -1, {}
    async for message in messages:
        if isinstance(message, stream_pb2.StreamHeader):
            prompt = message.prompt_positions
        elif isinstance(message, stream_pb2.StreamEnd):
            end = message.end_position
        else:
            for part in message.rows:
                for i, row in enumerate(part.tensor):
                    assert part.first_position + i not in by_name.setdefault(part.name, {})
                    by_name[part.name][part.first_position + i] = row.tolist()
    return prompt, by_name, end


async def test_rows_arrive_whole_in_pieces_and_only_those_asked_for():
    states = torch.randn(500, 128)  # 250 KiB: four chunks
    ids = torch.arange(503, dtype=torch.int32)
    wanted = [
        stream_pb2.RowSelection(name="hidden_states.0"),
        stream_pb2.RowSelection(name="token_ids", positions=stream_pb2.POSITIONS_OUTPUT),
    ]
    async with serving() as (hub, address, _), subscribe(source(address), "r", wanted) as messages:
        reading = asyncio.create_task(collect(messages))  # comes before the stream is opened
        with hub.open("s", ["token_ids", "hidden_states.0", "hidden_states.4"]) as stream:
            assert [w.name for w in await stream.subscription(GUARD_S)] == ["hidden_states.0", "token_ids"]
            stream.start(500)
            stream.put([Rows("hidden_states.0", 0, states), Rows("hidden_states.4", 0, states)])
            stream.put([Rows("token_ids", 0, ids[:500])])
            for i in range(500, 503):
                stream.put([Rows("token_ids", i, ids[i : i + 1])])
            stream.finish(503)
        prompt, by_name, end = await asyncio.wait_for(reading, GUARD_S)
        assert (prompt, end) == (500, 503)
        assert by_name["hidden_states.0"] == {i: row.tolist() for i, row in enumerate(states)}
        assert by_name["token_ids"] == {500: 500, 501: 501, 502: 502}
        assert "hidden_states.4" not in by_name
    await hub.drain()
    assert not hub.streams  # once its consumer has left


async def test_a_consumer_that_stops_reading_gets_no_more_than_its_credit():
    async with serving() as (hub, address, _):
        stub = stream_pb2_grpc.TensorStreamServiceStub(CHANNELS.channel(address))
        call = stub.Subscribe()
        first = stream_pb2.Subscription(stream_id="s", request_id="r", initial_credits=3)
        first.capabilities.max_chunk_bytes = 1024
        await call.write(stream_pb2.SubscribeRequest(subscription=first))
        with hub.open("s", ["codes"]) as stream:
            await stream.subscription(GUARD_S)
            stream.start(0)
            stream.put([Rows("codes", 0, torch.zeros(100, 256, dtype=torch.int32))])
            stream.finish(100)
        received = [await call.read() for _ in range(4)]
        assert [m.WhichOneof("message") for m in received] == ["header", "chunk", "chunk", "chunk"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(call.read())), 0.3)
        call.cancel()


async def test_rows_that_were_not_asked_for_need_no_credit():
    async with serving() as (hub, address, _):
        call = stream_pb2_grpc.TensorStreamServiceStub(CHANNELS.channel(address)).Subscribe()
        first = stream_pb2.Subscription(stream_id="s", request_id="r", initial_credits=1)
        first.rows.add(name="hidden_states.0")
        await call.write(stream_pb2.SubscribeRequest(subscription=first))
        await call.done_writing()  # as grpcurl does: no credit is to come
        with hub.open("s", ["token_ids", "hidden_states.0"]) as stream:
            await stream.subscription(GUARD_S)
            stream.start(2)
            stream.put([Rows("hidden_states.0", 0, torch.zeros(2, 8))])
            received = [(await asyncio.wait_for(call.read(), GUARD_S)).WhichOneof("message") for _ in range(2)]
            stream.put([Rows("token_ids", 0, torch.zeros(2, dtype=torch.int32))])
            stream.finish(2)
        assert received == ["header", "chunk"]
        assert (await asyncio.wait_for(call.read(), GUARD_S)).HasField("end")


async def test_a_grant_of_nothing_ends_even_a_finished_stream():
    async with serving() as (hub, address, _):
        call = stream_pb2_grpc.TensorStreamServiceStub(CHANNELS.channel(address)).Subscribe()
        first = stream_pb2.Subscription(stream_id="s", request_id="r", initial_credits=1)
        first.capabilities.max_chunk_bytes = 1024
        await call.write(stream_pb2.SubscribeRequest(subscription=first))
        with hub.open("s", ["codes"]) as stream:
            await stream.subscription(GUARD_S)
            stream.start(0)
            stream.put([Rows("codes", 0, torch.zeros(2, 256, dtype=torch.int32))])
            stream.finish(2)
        await call.write(stream_pb2.SubscribeRequest(credit=stream_pb2.Credit(chunks=0)))
        async with asyncio.timeout(GUARD_S):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await asyncio.wait_for(hub.drain(), GUARD_S)


async def test_a_consumer_that_gives_up_waiting_leaves_the_next_one_waiting():
    hub, subscription = StreamHub(), stream_pb2.Subscription(stream_id="s", initial_credits=1)
    first = asyncio.create_task(hub.claim(subscription, GUARD_S))
    await asyncio.sleep(0)
    second = asyncio.create_task(hub.claim(subscription, GUARD_S))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    with hub.open("s", ["codes"]) as stream:
        assert await asyncio.wait_for(second, GUARD_S) is stream


async def test_more_chunks_than_the_first_credit_flow_while_they_are_read():
    count = CREDITS * 5
    async with serving() as (hub, address, _), subscribe(source(address), "r", []) as messages:
        with hub.open("s", ["codes"]) as stream:
            stream.start(0)
            stream.put([Rows("codes", 0, torch.zeros(count, 16 * 1024, dtype=torch.int32))])  # a row a chunk
            stream.finish(count)
        assert len((await asyncio.wait_for(collect(messages), GUARD_S))[1]["codes"]) == count


async def test_a_producer_that_asks_for_room_waits_for_a_slow_consumer_and_for_no_other():
    frame = torch.zeros(1, 16 * 1024, dtype=torch.int32)  # a chunk
    async with serving() as (hub, address, _):
        with hub.open("s", ["codes"]) as stream:
            stream.start(0)
            for i in range(CREDITS + 8):
                stream.put([Rows("codes", i, frame)])
            await asyncio.wait_for(stream.room(4), GUARD_S)  # nobody has come yet
            async with subscribe(source(address), "r", []) as messages:
                assert isinstance(await anext(messages), stream_pb2.StreamHeader)
                waiting = asyncio.create_task(stream.room(4))
                await until(lambda: stream.pending_positions <= 8)
                await asyncio.sleep(0.1)
                assert not waiting.done()
                assert [each.pending_positions for each in hub.streams] == [stream.pending_positions] == [8]
                for _ in range(CREDITS):
                    await anext(messages)
                await asyncio.wait_for(waiting, GUARD_S)
                stream.put([Rows("codes", CREDITS + 8 + i, frame) for i in range(2 * CREDITS)])
                waiting = asyncio.create_task(stream.room(1))
                await asyncio.sleep(0.1)
                assert not waiting.done()
            await asyncio.wait_for(waiting, GUARD_S)  # the consumer has left


async def test_rows_are_gathered_after_the_first_positions_and_the_end_is_not_held_back(monkeypatch):
    gather = OutputStream._gather
    monkeypatch.setattr(
        OutputStream, "_gather", lambda self, delay_s: gather(self, 3600 * delay_s)
    )  # nothing comes by it
    frame, gathering = torch.zeros(1, 16, dtype=torch.int32), stream_pb2.Gathering(from_position=3, delay_ms=1000)
    async with serving() as (hub, address, _), subscribe(source(address), "r", [], gathering) as messages:
        with hub.open("s", ["codes"]) as stream:
            stream.start(2)
            assert isinstance(await asyncio.wait_for(anext(messages), GUARD_S), stream_pb2.StreamHeader)
            for i in range(6):  # each leaves at once: two of the prompt, and the sixth is the first before a wait
                stream.put([Rows("codes", i, frame)])
                chunk = await asyncio.wait_for(anext(messages), GUARD_S)
                assert isinstance(chunk, Chunk)
                assert [row.first_position for row in chunk.rows] == [i]
            for i in range(6, 9):
                stream.put([Rows("codes", i, frame)])
                await asyncio.sleep(0.01)
            stream.finish(9)
            chunk = await asyncio.wait_for(anext(messages), GUARD_S)
            assert isinstance(chunk, Chunk)
            assert [row.first_position for row in chunk.rows] == [6, 7, 8]
            assert isinstance(await asyncio.wait_for(anext(messages), GUARD_S), stream_pb2.StreamEnd)


@pytest.mark.parametrize("error", [QueueFull("full", 7.0), InvalidInput("speaker", "no such voice")])
async def test_the_producers_error_reaches_the_consumer_as_it_was(error):
    async with serving() as (hub, address, _), subscribe(source(address), "r", []) as messages:
        with contextlib.suppress(type(error)), hub.open("s", ["codes"]):
            raise error
        with pytest.raises(type(error)) as caught:
            await asyncio.wait_for(collect(messages), GUARD_S)
        assert vars(caught.value) == vars(error)
        assert str(caught.value) == str(error)


async def test_an_abandoned_request_cancels_its_stream():
    async with serving() as (hub, address, _), subscribe(source(address), "r", []) as messages:
        with hub.open("s", ["codes"]) as stream:
            stream.start(0)
        with pytest.raises(RequestCancelled):
            await asyncio.wait_for(collect(messages), GUARD_S)


async def test_rows_that_are_put_after_the_end_of_their_request_are_not_kept():
    hub = StreamHub()
    with hub.open("s", ["codes"]) as stream:
        stream.start(0)
        stream.put([Rows("codes", 0, torch.zeros(2, 4))])
    stream.put([Rows("codes", 2, torch.zeros(2, 4))])  # as by a thread that was sending when the request ended
    assert stream.pending_positions == 0


async def test_a_producer_that_dies_or_was_never_there_is_named_as_lost(monkeypatch):
    async with serving() as (hub, address, server), subscribe(source(address), "r", [], producer="talker") as messages:
        with hub.open("s", ["codes"]) as stream:
            stream.start(0)
            reading = asyncio.create_task(collect(messages))
            await stream.subscription(GUARD_S)
            await server.stop(None)
            with pytest.raises(StageLost) as died:
                await asyncio.wait_for(reading, GUARD_S)
        monkeypatch.setattr("services.common.stream.consumer.CONNECT_TIMEOUT_S", 0.3)
        async with subscribe(source(address), "r", [], producer="talker") as messages:
            with pytest.raises(StageLost) as never_there:
                await asyncio.wait_for(collect(messages), GUARD_S)
    for lost in (died.value, never_there.value):
        assert (lost.origin, str(lost)) == ("talker", "the talker went away while it answered")
    assert address in never_there.value.detail


async def test_rows_that_are_not_offered_and_a_second_consumer_are_refused():
    async with serving() as (hub, address, _):
        with hub.open("s", ["codes"]) as stream:
            selection = [stream_pb2.RowSelection(name="nonsense")]
            async with subscribe(source(address), "r", selection) as messages:
                with pytest.raises(InvalidInput, match="nonsense"):
                    await asyncio.wait_for(collect(messages), GUARD_S)
            async with subscribe(source(address), "r", []) as first, subscribe(source(address), "r", []) as second:
                reading = asyncio.create_task(collect(first))
                await stream.subscription(GUARD_S)
                with pytest.raises(AlreadyExists, match="consumer already"):
                    await asyncio.wait_for(collect(second), GUARD_S)
                stream.start(0)
                stream.finish(0)
                assert (await asyncio.wait_for(reading, GUARD_S))[2] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.int32, torch.int64])
def test_tensors_round_trip(dtype):
    tensor = (torch.randn(3, 0, 5) if dtype is torch.int64 else torch.randn(3, 4, 5) * 100).to(dtype)
    assert torch.equal(to_torch(to_message(tensor)), tensor)


def test_tensors_that_contradict_themselves_are_refused():
    message = to_message(torch.zeros(2, 3))
    message.shape[0] = 3
    with pytest.raises(InvalidInput, match=r"codes.inline: has 24 bytes, but shape \[3, 3\]"):
        to_torch(message, "codes")
    message.shape[:] = [-2, -3]
    with pytest.raises(InvalidInput, match="negative"):
        to_torch(message)
    message.shape[:] = [0, 2**62, 2**62]
    message.inline = b""
    with pytest.raises(InvalidInput, match="shape"):
        to_torch(message)
    message.dtype = tensor_pb2.DATA_TYPE_UNSPECIFIED
    with pytest.raises(InvalidInput, match="dtype"):
        to_torch(message)
