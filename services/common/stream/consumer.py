"""The consumer's side of a tensor stream: subscribes, reads chunks in their order, grants credit."""

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import structlog

from quartet.v1 import stream_pb2, stream_pb2_grpc, tensor_pb2
from services.common.rpc.call import at_end_of_request, outgoing_metadata
from services.common.rpc.channels import channel
from services.common.rpc.errors import InvalidInput, StageLost, Unavailable
from services.common.rpc.status import from_rpc_error
from services.common.stream.arena_files import ArenaReader
from services.common.stream.rows import Chunk, Rows
from services.common.stream.shared_memory import host_facts
from services.common.stream.tensors import Handle, check, to_torch
from services.common.stream.ucx import UcxReceiver
from services.common.stream.ucx_worker import UcxWorker

CREDITS = 32
CONNECT_TIMEOUT_S = 5.0
LATE_S = 5.0
"""Longest wait for a tensor whose producer says that it has arrived."""

StreamMessage = stream_pb2.StreamHeader | Chunk | stream_pb2.StreamEnd

_T = TypeVar("_T")

log = structlog.get_logger()


class CreditWriter:
    """The requests of `call` after the first. One task writes them, as grpc.aio takes one write at a time; what comes
    up during a write goes with the next.

    Args:
        due_chunks: credit is granted for so many chunks at once.

    Attributes:
        broken: a write failed, because the call has ended.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall, due_chunks: int) -> None:
        self.broken = False
        self._call, self._due_chunks = call, due_chunks
        self._loop = asyncio.get_running_loop()
        self._taken = 0
        self._released: list[int] = []
        self._held: set[int] = set()
        self._finished = False
        self._due = asyncio.Event()
        self._writer = asyncio.create_task(self._write())

    def took_chunk(self) -> None:
        """The consumer has dealt with a chunk."""
        self._taken += 1
        if self._taken >= self._due_chunks:
            self._due.set()

    def hold(self, lease_id: int, view: memoryview) -> None:
        """The lease is released when `view` is garbage: when nothing reads that memory any more."""
        self._held.add(lease_id)
        weakref.finalize(view, self._on_garbage, lease_id).atexit = False

    def _on_garbage(self, lease_id: int) -> None:
        """In whatever thread had the last reference."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the call with it
            self._loop.call_soon_threadsafe(self._release, lease_id)

    def _release(self, lease_id: int) -> None:
        self._held.discard(lease_id)
        self._released.append(lease_id)
        self._due.set()
        if self._finished and not self._held:
            self.cancel()

    def finish(self) -> None:
        """The consumer reads no more messages. The call goes on until it reads no more memory either, or its request
        has ended: till then the producer does not use that memory again."""
        self._finished = True
        if self._held:
            at_end_of_request(self.cancel)
        else:
            self.cancel()

    def cancel(self) -> None:
        """Ends the call now."""
        self._writer.cancel()
        self._call.cancel()

    async def _write(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            credit = stream_pb2.Credit(chunks=self._taken, released=self._released)
            self._taken, self._released = 0, []
            try:
                await self._call.write(stream_pb2.SubscribeRequest(credit=credit))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                self.broken = True
                return


class ResponseReader:
    """The responses of `call`. While a tensor is on its way, what follows it is read, as far as there is credit for
    it: that is how a call that breaks meanwhile is noticed."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self._call = call
        self._read: deque[stream_pb2.SubscribeResponse | None] = deque()
        self._reading: asyncio.Task[stream_pb2.SubscribeResponse | None] | None = None

    async def next(self) -> stream_pb2.SubscribeResponse | None:
        """The next one; None when there are no more.

        Raises:
            grpc.aio.AioRpcError: the call failed.
        """
        if self._read:
            return self._read.popleft()
        reading, self._reading = self._reading, None
        return await (reading or self._one())

    async def during(self, arrival: Coroutine[Any, Any, _T]) -> _T:
        """What `arrival` gives, unless the call fails before.

        Raises:
            grpc.aio.AioRpcError: the call failed.
            Unavailable: the call has ended, and it does not come.
        """
        arriving = asyncio.create_task(arrival)
        try:
            while not arriving.done() and not (self._read and self._read[-1] is None):
                reading = self._reading = self._reading or asyncio.create_task(self._one())
                await asyncio.wait({arriving, reading}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    self._reading = None
                    self._read.append(reading.result())
            async with asyncio.timeout(LATE_S):
                return await arriving
        except TimeoutError:
            raise Unavailable("a tensor that was announced did not come") from None
        finally:
            arriving.cancel()

    async def _one(self) -> stream_pb2.SubscribeResponse | None:
        response = await self._call.read()
        return response if isinstance(response, stream_pb2.SubscribeResponse) else None  # else it is grpc.aio.EOF

    def close(self) -> None:
        """Reads no more."""
        if self._reading:
            self._reading.cancel()


class ChunkReader:
    """Turns a stream's chunk messages into chunks.

    Args:
        directory: of arenas.
        inbox: None without UCX.
    """

    def __init__(
        self, directory: Path, inbox: UcxReceiver | None, feedback: CreditWriter, responses: ResponseReader
    ) -> None:
        self._reader, self._inbox = ArenaReader(directory), inbox
        self._feedback, self._responses = feedback, responses

    async def chunk(self, message: stream_pb2.StreamChunk) -> Chunk:
        """The chunk, when all of it is here.

        Raises:
            InvalidInput: a tensor's parts do not fit together, or are not where it says.
            Unavailable: a tensor broke off.
            grpc.aio.AioRpcError: the call failed meanwhile.
        """
        return Chunk([await self._rows(rows, f"source.{rows.name}") for rows in message.rows])

    async def _rows(self, rows: stream_pb2.Rows, field: str) -> Rows:
        message = rows.tensor
        if message.WhichOneof("payload") != "ucx":
            return Rows(rows.name, rows.first_position, to_torch(message, field, self._resolve))
        if self._inbox is None:
            raise InvalidInput(f"{field}.ucx", "was not offered")
        check(message, message.ucx.size_bytes, field)  # before memory is taken for it
        data = await self._responses.during(self._inbox.receive(message.ucx, f"{field}.ucx"))
        return Rows(rows.name, rows.first_position, to_torch(message, field, lambda handle, field: data))

    def _resolve(self, handle: Handle, field: str) -> memoryview:
        assert isinstance(handle, tensor_pb2.SharedMemory)
        view = self._reader.read(handle, field)
        self._feedback.hold(handle.lease_id, view)
        return view


class _Readable:
    """What this process tells producers that it reads."""

    directory = Path("/dev/shm")
    capabilities = stream_pb2.ConsumerCapabilities()  # inline only
    ucx: UcxWorker | None = None


def set_consumer_transports(transports: Sequence[str], directory: str, ucx: UcxWorker | None = None) -> None:
    """Sets what this process reads streams by: "inline", or also "shared_memory" of arenas in `directory`, or what
    comes to `ucx`."""
    capabilities = stream_pb2.ConsumerCapabilities(transports=[stream_pb2.TRANSPORT_INLINE])
    _Readable.directory, _Readable.capabilities, _Readable.ucx = Path(directory), capabilities, ucx
    if "shared_memory" in transports:
        try:
            capabilities.shared_memory_host.CopyFrom(host_facts(_Readable.directory))
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
    feedback = CreditWriter(call, due_chunks=CREDITS // 2)
    inbox = UcxReceiver(_Readable.ucx) if _Readable.ucx else None
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
    feedback: CreditWriter,
    inbox: UcxReceiver | None,
    producer: str,
) -> AsyncIterator[StreamMessage]:
    responses = ResponseReader(call)
    incoming = ChunkReader(_Readable.directory, inbox, feedback, responses)
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
