"""Reads one stream's messages in order, and its tensors from wherever they are; grants credit for more."""

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc

from quartet.v1 import stream_pb2, tensor_pb2
from services.common.errors import InvalidInput, Unavailable
from services.common.rpc.call import at_end_of_request
from services.common.stream.arena_files import ArenaReader
from services.common.stream.rows import Chunk, Rows
from services.common.stream.tensors import Handle, check, to_torch
from services.common.stream.ucx import UcxReceiver

LATE_S = 5.0  # longest wait for an announced tensor after the call has ended

_T = TypeVar("_T")

SubscribeCall = grpc.aio.StreamStreamCall[stream_pb2.SubscribeRequest, stream_pb2.SubscribeResponse]


class CreditWriter:
    """Grants a producer credit for chunks that were read, and releases its leases.

    One task writes all requests of `call` after the first, because grpc.aio takes one write at a time. What comes up
    during a write goes with the next.

    Args:
        call: to the producer.
        due_chunks: number of chunks for which credit is granted at once.

    Attributes:
        broken: a write failed, because the call has ended.
    """

    def __init__(self, call: SubscribeCall, due_chunks: int) -> None:
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
        """Releases the lease when `view` is garbage."""
        self._held.add(lease_id)
        weakref.finalize(view, self._on_garbage, lease_id).atexit = False

    def _on_garbage(self, lease_id: int) -> None:
        """Runs in the thread that had the last reference."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the call with it
            self._loop.call_soon_threadsafe(self._release, lease_id)

    def _release(self, lease_id: int) -> None:
        self._held.discard(lease_id)
        self._released.append(lease_id)
        self._due.set()
        if self._finished and not self._held:
            self.cancel()

    def finish(self) -> None:
        """The consumer reads no more messages. The call stays open until no lease is held, or the request has ended:
        until then the producer does not write to leased memory."""
        self._finished = True
        if self._held:
            at_end_of_request(self.cancel)
        else:
            self.cancel()

    def cancel(self) -> None:
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


class ChunkReader:
    """Reads the responses of `call`, and the tensors of its chunks.

    While it waits for a tensor beside the call it reads responses ahead, so that it notices a broken call. Credit
    bounds how many.

    Args:
        call: to the producer.
        directory: of arenas.
        receiver: of tensors that come by UCX; None without UCX.
        credit: learns which leases are held.
    """

    def __init__(
        self, call: SubscribeCall, directory: Path, receiver: UcxReceiver | None, credit: CreditWriter
    ) -> None:
        self.call, self.credit = call, credit
        self._arenas, self._receiver = ArenaReader(directory), receiver
        self._read_ahead: deque[stream_pb2.SubscribeResponse | None] = deque()
        self._reading: asyncio.Task[stream_pb2.SubscribeResponse | None] | None = None

    async def response(self) -> stream_pb2.SubscribeResponse | None:
        """The next one; None at the end.

        Raises:
            grpc.aio.AioRpcError: the call failed.
            InvalidInput: it cannot be read.
        """
        if self._read_ahead:
            return self._read_ahead.popleft()
        reading, self._reading = self._reading, None
        return await (reading or self._one())

    async def _one(self) -> stream_pb2.SubscribeResponse | None:
        response: Any = await self.call.read()
        if isinstance(response, InvalidInput):
            raise response
        return response if isinstance(response, stream_pb2.SubscribeResponse) else None  # else it is grpc.aio.EOF

    async def read(self, message: stream_pb2.StreamChunk) -> Chunk:
        """The whole chunk.

        Raises:
            InvalidInput: a tensor's parts do not fit together, or are not where it says.
            Unavailable: a tensor broke off.
            grpc.aio.AioRpcError: the call failed meanwhile.
        """
        return Chunk([await self._rows(rows, f"source.{rows.name}") for rows in message.rows])

    async def _rows(self, rows: stream_pb2.Rows, field: str) -> Rows:
        message = rows.tensor
        if message.WhichOneof("payload") != "ucx":
            return Rows(rows.name, rows.first_position, to_torch(message, field, self._shared))
        if self._receiver is None:
            raise InvalidInput(f"{field}.ucx", "was not offered")
        check(message, message.ucx.size_bytes, field)  # before memory is taken for it
        data = await self._while_the_call_lasts(self._receiver.receive(message.ucx, f"{field}.ucx"))
        return Rows(rows.name, rows.first_position, to_torch(message, field, lambda handle, field: data))

    def _shared(self, handle: Handle, field: str) -> memoryview:
        assert isinstance(handle, tensor_pb2.SharedMemory)
        view = self._arenas.read(handle, field)
        self.credit.hold(handle.lease_id, view)
        return view

    async def _while_the_call_lasts(self, arrival: Coroutine[Any, Any, _T]) -> _T:
        """Awaits `arrival`; fails when the call fails, and `LATE_S` after its end."""
        arriving = asyncio.create_task(arrival)
        try:
            while not arriving.done() and not (self._read_ahead and self._read_ahead[-1] is None):
                reading = self._reading = self._reading or asyncio.create_task(self._one())
                await asyncio.wait({arriving, reading}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    self._reading = None
                    self._read_ahead.append(reading.result())
            async with asyncio.timeout(LATE_S):
                return await arriving
        except TimeoutError:
            raise Unavailable("a tensor that was announced did not come") from None
        finally:
            arriving.cancel()

    def close(self) -> None:
        if self._reading:
            self._reading.cancel()
