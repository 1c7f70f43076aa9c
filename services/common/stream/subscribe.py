"""The consumer's side of a tensor stream."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import structlog

from quartet.v1 import stream_pb2, stream_pb2_grpc
from services.common.rpc.call import outgoing_metadata
from services.common.rpc.channels import channel
from services.common.rpc.errors import InvalidInput, StageLost, Unavailable
from services.common.rpc.status import from_rpc_error
from services.common.stream.feedback import Feedback
from services.common.stream.incoming import Incoming, Responses
from services.common.stream.rows import Chunk
from services.common.stream.shm.host import host
from services.common.stream.ucx.inbox import Inbox
from services.common.stream.ucx.worker import Worker

CREDITS = 32
CONNECT_TIMEOUT_S = 5.0

StreamMessage = stream_pb2.StreamHeader | Chunk | stream_pb2.StreamEnd

log = structlog.get_logger()


class _Readable:
    """What this process tells producers that it reads."""

    directory = Path("/dev/shm")
    capabilities = stream_pb2.ConsumerCapabilities()  # inline only
    ucx: Worker | None = None


def read_by(transports: Sequence[str], directory: str, ucx: Worker | None = None) -> None:
    """Sets what this process reads streams by: "inline", or also "shared_memory" of arenas in `directory`, or what
    comes to `ucx`."""
    capabilities = stream_pb2.ConsumerCapabilities(transports=[stream_pb2.TRANSPORT_INLINE])
    _Readable.directory, _Readable.capabilities, _Readable.ucx = Path(directory), capabilities, ucx
    if "shared_memory" in transports:
        try:
            capabilities.shared_memory_host.CopyFrom(host(_Readable.directory))
            capabilities.transports.append(stream_pb2.TRANSPORT_SHARED_MEMORY)
        except OSError as error:
            log.warning("no shared memory is read: tensors come inline", directory=directory, reason=str(error))
    if ucx:
        capabilities.transports.append(stream_pb2.TRANSPORT_UCX)


@asynccontextmanager
async def subscribe(
    source: stream_pb2.StreamSource,
    request_id: str,
    rows: Sequence[stream_pb2.RowSelection],
    gathering: stream_pb2.Gathering | None = None,
    *,
    producer: str = "",
) -> AsyncIterator[AsyncIterator[StreamMessage]]:
    """Subscribes to `rows` of a producer's stream; leaving the context ends the subscription.

    Yields an iterator over the header, the chunks and the end. It grants credit as chunks are taken from it, so a
    consumer that stops reading stops its producer's stream after `CREDITS` chunks.

    Tensors of chunks may be the producer's own memory. They stay as they are until they are garbage, the context is
    left by an exception, or the request that is being served (`serve_call`) ends; what is needed longer must be copied.

    Args:
        producer: kind of the stage that the stream comes from: the origin of what it fails with.

    Raises (from the iterator, save InvalidInput for `source`):
        InvalidInput: `source` is incomplete; a tensor's parts do not fit together, or are not where it says.
        StageLost: the producer cannot be reached within `CONNECT_TIMEOUT_S`, or broke off before the end.
        StageError: whatever ended the producer's request.
    """
    for field in ("address", "stream_id"):
        if not getattr(source, field):
            raise InvalidInput(f"source.{field}", "is required")
    stub = stream_pb2_grpc.TensorStreamServiceStub(channel(source.address, source.server_name))
    call = stub.Subscribe(metadata=outgoing_metadata(), wait_for_ready=True)
    feedback = Feedback(call, due_chunks=CREDITS // 2)
    inbox = Inbox(_Readable.ucx) if _Readable.ucx else None
    try:
        subscription = stream_pb2.Subscription(
            stream_id=source.stream_id,
            request_id=request_id,
            rows=rows,
            initial_credits=CREDITS,
            capabilities=_Readable.capabilities,
            gathering=gathering,
        )
        if inbox:
            subscription.capabilities.ucx.CopyFrom(inbox.offer)
        yield _messages(call, source, subscription, feedback, inbox, producer)
    except BaseException:
        feedback.cancel()
        raise
    finally:
        if inbox:
            inbox.close()
    feedback.finish()


async def _messages(
    call: grpc.aio.StreamStreamCall,
    source: stream_pb2.StreamSource,
    subscription: stream_pb2.Subscription,
    feedback: Feedback,
    inbox: Inbox | None,
    producer: str,
) -> AsyncIterator[StreamMessage]:
    responses = Responses(call)
    incoming = Incoming(_Readable.directory, inbox, feedback, responses)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await call.write(stream_pb2.SubscribeRequest(subscription=subscription))
            await call.initial_metadata()
        while response := await responses.next():
            message = getattr(response, response.WhichOneof("message"))
            if isinstance(message, stream_pb2.StreamChunk):
                yield await incoming.chunk(message)
                feedback.took_chunk()
                continue
            yield message
            if isinstance(message, stream_pb2.StreamEnd):
                return
    except TimeoutError:
        raise StageLost(producer, f"no producer at {source.address} within {CONNECT_TIMEOUT_S:g} s") from None
    except Unavailable as error:  # a tensor beside the stream broke off
        raise StageLost(producer, f"from {source.address}: {error}") from None
    except grpc.aio.AioRpcError as error:
        # A write that fails hides the call's own status: grpc.aio overwrites it.
        if feedback.broken:
            raise StageLost(producer, f"the stream from {source.address} broke off") from None
        raise from_rpc_error(error, producer) from None
    finally:
        responses.close()
    raise StageLost(producer, f"the stream from {source.address} ended before it was complete")
