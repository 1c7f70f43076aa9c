"""A consumer's reading of one stream: messages in their order, tensors from wherever they are."""

import asyncio
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc

from quartet.v1 import stream_pb2, tensor_pb2
from services.common.rpc.errors import InvalidInput, Unavailable
from services.common.stream.feedback import Feedback
from services.common.stream.rows import Chunk, Rows
from services.common.stream.shm.reader import ArenaReader
from services.common.stream.tensors import Handle, check, to_torch
from services.common.stream.ucx.inbox import Inbox

LATE_S = 5.0
"""Longest wait for a tensor whose producer says that it has arrived."""

_T = TypeVar("_T")


class Responses:
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


class Incoming:
    """Turns a stream's chunk messages into chunks.

    Args:
        directory: of arenas.
        inbox: None without UCX.
    """

    def __init__(self, directory: Path, inbox: Inbox | None, feedback: Feedback, responses: Responses) -> None:
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
