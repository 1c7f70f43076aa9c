"""Reads the streams of other stages."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import cast

import grpc
import structlog

from quartet.v1 import stream_pb2
from services.common.errors import StageLost, Unavailable, require
from services.common.rpc.call import outgoing_metadata
from services.common.rpc.channels import MAX_MESSAGE_BYTES, Channels
from services.common.rpc.guard import deserializer, kept
from services.common.rpc.status import from_rpc_error
from services.common.stream.chunk_reader import ChunkReader, CreditWriter, SubscribeCall
from services.common.stream.frames_in_flight import FRAMES_IN_FLIGHT
from services.common.stream.rows import Chunk
from services.common.stream.shared_memory import host_facts
from services.common.stream.ucx import UcxTransport

CREDITS = FRAMES_IN_FLIGHT // 4  # chunks
CONNECT_TIMEOUT_S = 5.0

_SUBSCRIBE = "/quartet.v1.TensorStreamService/Subscribe"
_RESPONSE = stream_pb2.SubscribeResponse
_PARSE = kept(deserializer(_RESPONSE.DESCRIPTOR, _RESPONSE.FromString, MAX_MESSAGE_BYTES))

StreamMessage = stream_pb2.StreamHeader | Chunk | stream_pb2.StreamEnd

log = structlog.get_logger()


class ConsumerTransports:
    """How a process reads tensors: inline, in shared memory if `names` has it, and by UCX.

    Args:
        names: of transports, as in the settings.
        directory: of the arenas that are read.
        ucx: None without UCX.

    Attributes:
        capabilities: sent to producers.
    """

    def __init__(self, names: Sequence[str], directory: Path, ucx: UcxTransport | None = None) -> None:
        self.directory, self.ucx = directory, ucx
        self.capabilities = stream_pb2.ConsumerCapabilities(transports=[stream_pb2.TRANSPORT_INLINE])
        if "shared_memory" in names:
            try:
                self.capabilities.shared_memory_host.CopyFrom(host_facts(directory))
                self.capabilities.transports.append(stream_pb2.TRANSPORT_SHARED_MEMORY)
            except OSError as error:
                where = str(directory)
                log.warning("no shared memory is read: tensors come inline", directory=where, reason=str(error))
        if ucx:
            self.capabilities.transports.append(stream_pb2.TRANSPORT_UCX)


class StreamConsumer:
    """Reads the streams of other stages; without `transports` inline only."""

    def __init__(self, channels: Channels, transports: ConsumerTransports | None = None) -> None:
        self.channels = channels
        self.transports = transports or ConsumerTransports(["inline"], Path("/dev/shm"))

    @asynccontextmanager
    async def subscribe(
        self,
        source: stream_pb2.StreamSource,
        request_id: str,
        rows: Sequence[stream_pb2.RowSelection],
        gathering: stream_pb2.Gathering | None = None,
        *,
        producer: str = "",
    ) -> AsyncGenerator[AsyncIterator[StreamMessage]]:
        """Subscribes to `rows` of a producer's stream; leaving the context ends the subscription.

        Yields an iterator over the header, the chunks and the end. It grants credit as chunks are taken from it: a
        consumer that does not read stops the stream after `CREDITS` chunks.

        Tensors of chunks may be the producer's own memory. They are valid until the context is left by an exception, or
        the request that is being served (`serve_call`) ends; copy what is needed longer.

        Args:
            source: address and id of the stream.
            request_id: of the request that the rows belong to.
            rows: kinds and parts of rows; empty: all.
            gathering: how long the producer may gather rows for a chunk.
            producer: kind of the producing stage, the origin of its errors.

        Raises (from the iterator, save InvalidInput for `source`):
            InvalidInput: `source` is incomplete; a tensor's parts do not fit together, or are not where it says.
            StageLost: the producer cannot be reached within `CONNECT_TIMEOUT_S`, or broke off before the end.
            StageError: whatever ended the producer's request.
        """
        for field in ("address", "stream_id"):
            require(getattr(source, field), f"source.{field}", "is required")
        subscription = stream_pb2.Subscription(
            stream_id=source.stream_id,
            request_id=request_id,
            rows=rows,
            initial_credits=CREDITS,
            capabilities=self.transports.capabilities,
            gathering=gathering,
        )
        channel = self.channels.channel(source.address, source.server_name)
        method = channel.stream_stream(_SUBSCRIBE, stream_pb2.SubscribeRequest.SerializeToString, _PARSE)
        call = cast("SubscribeCall", method(metadata=outgoing_metadata(), wait_for_ready=True))
        with self._reader(call, subscription) as chunks:
            yield _messages(subscription, chunks, source.address, producer)

    @contextmanager
    def _reader(self, call: SubscribeCall, subscription: stream_pb2.Subscription) -> Generator[ChunkReader]:
        """Reads the chunks of `subscription`, into which it puts the address for UCX."""
        credit = CreditWriter(call, due_chunks=CREDITS // 2)
        receiver = self.transports.ucx.receiver() if self.transports.ucx else None
        try:
            if receiver:
                subscription.capabilities.ucx.CopyFrom(receiver.offer)
            yield ChunkReader(call, self.transports.directory, receiver, credit)
        except BaseException:
            credit.cancel()
            raise
        finally:
            if receiver:
                receiver.close()
        credit.finish()


async def _messages(
    subscription: stream_pb2.Subscription, chunks: ChunkReader, address: str, producer: str
) -> AsyncIterator[StreamMessage]:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await chunks.call.write(stream_pb2.SubscribeRequest(subscription=subscription))
            await chunks.call.initial_metadata()
        while response := await chunks.response():
            message = getattr(response, response.WhichOneof("message"))
            if isinstance(message, stream_pb2.StreamChunk):
                yield await chunks.read(message)
                chunks.credit.took_chunk()
                continue
            yield message
            if isinstance(message, stream_pb2.StreamEnd):
                return
    except TimeoutError:
        raise StageLost(producer, f"no producer at {address} within {CONNECT_TIMEOUT_S:g} s") from None
    except Unavailable as error:  # a tensor beside the stream broke off
        raise StageLost(producer, f"from {address}: {error}") from None
    except grpc.aio.AioRpcError as error:
        # A write that fails hides the call's own status: grpc.aio overwrites it.
        if chunks.credit.broken:
            raise StageLost(producer, f"the stream from {address} broke off") from None
        raise from_rpc_error(error, producer) from None
    finally:
        chunks.close()
    raise StageLost(producer, f"the stream from {address} ended before it was complete")
