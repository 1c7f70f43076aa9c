"""What a consumer tells its producer while it reads: credit, and which memory it reads no more."""

import asyncio
import contextlib
import weakref

import grpc

from quartet.v1 import stream_pb2
from services.common.rpc.call import at_end_of_request


class Feedback:
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
