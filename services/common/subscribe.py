"""The consumer's side of a tensor stream."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc

from quartet.v1 import stream_pb2, stream_pb2_grpc
from services.common.call import outgoing_metadata
from services.common.channels import channel
from services.common.errors import InvalidInput, Unavailable
from services.common.status import from_rpc_error

CREDITS = 32
CONNECT_TIMEOUT_S = 5.0

StreamMessage = stream_pb2.StreamHeader | stream_pb2.StreamChunk | stream_pb2.StreamEnd


@asynccontextmanager
async def subscribe(
    source: stream_pb2.StreamSource,
    request_id: str,
    rows: Sequence[stream_pb2.RowSelection],
    gathering: stream_pb2.Gathering | None = None,
) -> AsyncIterator[AsyncIterator[StreamMessage]]:
    """Subscribes to `rows` of a producer's stream; leaving the context ends the subscription.

    Yields an iterator over the header, the chunks and the end. It grants credit as chunks are taken from it, so a
    consumer that stops reading stops its producer's stream after `CREDITS` chunks.

    Raises (from the iterator, save InvalidInput):
        InvalidInput: `source` is incomplete.
        Unavailable: the producer cannot be reached within `CONNECT_TIMEOUT_S`, or broke off before the end.
        StageError: whatever ended the producer's request.
    """
    for field in ("address", "stream_id"):
        if not getattr(source, field):
            raise InvalidInput(f"source.{field}", "is required")
    stub = stream_pb2_grpc.TensorStreamServiceStub(channel(source.address, source.server_name))
    call = stub.Subscribe(metadata=outgoing_metadata(), wait_for_ready=True)
    try:
        subscription = stream_pb2.Subscription(
            stream_id=source.stream_id,
            request_id=request_id,
            rows=rows,
            initial_credits=CREDITS,
            gathering=gathering,
        )
        yield _messages(call, source, subscription)
    finally:
        call.cancel()


async def _messages(
    call: grpc.aio.StreamStreamCall,
    source: stream_pb2.StreamSource,
    subscription: stream_pb2.Subscription,
) -> AsyncIterator[StreamMessage]:
    taken = 0
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await call.write(stream_pb2.SubscribeRequest(subscription=subscription))
            await call.initial_metadata()
        async for response in call:
            message = getattr(response, response.WhichOneof("message"))
            yield message
            if isinstance(message, stream_pb2.StreamEnd):
                return
            taken += isinstance(message, stream_pb2.StreamChunk)
            if taken >= CREDITS // 2:
                await _grant(call, source, taken)
                taken = 0
    except TimeoutError:
        raise Unavailable(f"no producer at {source.address} within {CONNECT_TIMEOUT_S:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    raise Unavailable(f"the stream from {source.address} ended before it was complete")


async def _grant(call: grpc.aio.StreamStreamCall, source: stream_pb2.StreamSource, chunks: int) -> None:
    """Grants credit. A producer that is complete waits for us, so a write fails only when it broke off; the failed
    write hides the call's own status (grpc.aio overwrites it)."""
    try:
        await call.write(stream_pb2.SubscribeRequest(credit=stream_pb2.Credit(chunks=chunks)))
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        raise Unavailable(f"the stream from {source.address} broke off") from None
