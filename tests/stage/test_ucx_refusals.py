"""Tensors by UCX: what a peer announces that cannot be is refused, with the name of its field."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.v1 import stream_pb2, stream_pb2_grpc, tensor_pb2
from services.common.errors import InvalidInput, Unavailable
from services.common.stream.chunk_reader import ChunkReader
from services.common.stream.ucx import UcxReceiver
from tests.support.clock import until
from tests.support.stage.shm import read_all, source
from tests.support.stage.streaming import CHANNELS, reading, subscribe
from tests.support.stage.ucx import ARENAS, edge, working

pytestmark = pytest.mark.skipif(not find_spec("ucxx"), reason="needs ucxx: pip install 'quartet[ucx]'")


class Liar(stream_pb2_grpc.TensorStreamServiceServicer):
    """A producer that announces what `kind` says, and sends four bytes."""

    def __init__(self, worker, kind: str) -> None:
        self._worker, self._kind = worker, kind

    async def Subscribe(self, request_iterator, context):
        await context.send_initial_metadata(())
        first = await anext(aiter(request_iterator))
        inbox = first.subscription.capabilities.ucx
        rows = stream_pb2.Rows(name="states")
        rows.tensor.dtype, rows.tensor.shape[:] = tensor_pb2.DATA_TYPE_FLOAT32, [2 if self._kind == "size" else 1]
        rows.tensor.ucx.size_bytes, rows.tensor.ucx.tag = rows.tensor.shape[0] * 4, inbox.tag + 5
        if self._kind == "tag":
            rows.tensor.ucx.tag = 2**63
        if self._kind == "huge":
            rows.tensor.shape[0] = 2**40
            rows.tensor.ucx.size_bytes = 2**42
        if self._kind == "shape":
            rows.tensor.shape[0] = 3
        if inbox.worker_address:
            self._worker.send(self._worker.peer(inbox.worker_address), np.zeros(4, np.uint8), inbox.tag + 5)
        yield stream_pb2.SubscribeResponse(header=stream_pb2.StreamHeader())
        yield stream_pb2.SubscribeResponse(chunk=stream_pb2.StreamChunk(rows=[rows]))
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("tag", "source.states.ucx.tag"),
        ("size", "source.states.ucx.size_bytes"),
        ("huge", "source.states.ucx.size_bytes"),
        ("shape", "source.states.ucx.size_bytes"),
        ("not offered", "source.states.ucx"),
    ],
)
async def test_a_producer_that_lies_is_found_out(kind: str, field: str):
    with working() as theirs, working() as ours:
        server = grpc.aio.server()
        stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(Liar(theirs, kind), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            with reading(ARENAS, ucx=None if kind == "not offered" else ours), pytest.raises(InvalidInput) as found:
                async with subscribe(source(address), "r", []) as messages:
                    await read_all(messages)
            assert found.value.field == field
            await until(lambda: not theirs._running and not ours._running)
        finally:
            await server.stop(None)
            await CHANNELS.close_all()


class _Ended:
    """A call on which nothing follows."""

    async def read(self):
        return grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="module")
def inbox():
    with working() as worker:
        yield UcxReceiver(worker)


@given(
    dtype=st.integers(-1, 9),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 1100), max_size=4),
    tag=st.integers(0, 2**64 - 1) | st.none(),
    size_bytes=st.integers(0, 2**64 - 1) | st.integers(0, 4000),
)
@settings(max_examples=500, deadline=None)
async def test_the_decoder_names_a_field_or_waits_for_what_is_announced(inbox, dtype, shape, tag, size_bytes):
    rows = stream_pb2.Rows(name="t")
    rows.tensor.dtype = dtype
    rows.tensor.shape.extend(shape)
    rows.tensor.ucx.size_bytes, rows.tensor.ucx.tag = size_bytes, inbox.offer.tag + 3 if tag is None else tag
    incoming = ChunkReader(_Ended(), Path("/dev/shm"), inbox, None)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("services.common.stream.chunk_reader.LATE_S", 0.01)
        with pytest.raises((InvalidInput, Unavailable)) as refused:
            await incoming.read(stream_pb2.StreamChunk(rows=[rows]))
    if isinstance(refused.value, InvalidInput):
        assert refused.value.field.startswith("source.t.")
    else:  # all of it fits together, and it does not come
        assert tag is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"worker_address": b""}, "subscription.capabilities.ucx.worker_address"),
        ({"worker_address": bytes(2**17)}, "subscription.capabilities.ucx.worker_address"),
        ({"tag": 0}, "subscription.capabilities.ucx.tag"),
        ({"tag": 2**24 + 1}, "subscription.capabilities.ucx.tag"),
    ],
)
async def test_a_wrong_inbox_is_refused(changes: dict, field: str):
    async with edge() as e:
        subscription = stream_pb2.Subscription(stream_id="s", request_id="r", initial_credits=1)
        subscription.capabilities.transports.append(stream_pb2.TRANSPORT_UCX)
        inbox = {"worker_address": e.consumer.address, "tag": 2**24} | changes
        subscription.capabilities.ucx.CopyFrom(stream_pb2.UcxInbox(**inbox))
        call = stream_pb2_grpc.TensorStreamServiceStub(CHANNELS.channel(e.address)).Subscribe()
        await call.write(stream_pb2.SubscribeRequest(subscription=subscription))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert field in (refused.value.details() or "")
