"""The producer's side of a tensor stream: buffers rows, sends what the consumer has granted credit for."""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

from quartet.v1 import stream_pb2
from services.common.errors import InvalidInput, StageError, Unavailable
from services.common.stream.rows import Rows, end_position, is_selected, take_inline
from services.common.stream.tensors import Transport, TransportSession, data_type

DEFAULT_CHUNK_BYTES = 64 * 1024


class OutputStream:
    """One request's rows on their way to one consumer. For the event loop's thread only.

    `put` never blocks, as an engine's step must not wait for a network. The request itself (context length, most
    frames) bounds what is buffered, as does `room` where the producer can wait; credit bounds what is in flight.

    Attributes:
        consumer_gone: its call has ended.
        pending_positions: positions put and not sent, of all kinds of rows.
        credits: chunks granted and not sent.
        oldest_put: time.monotonic() seconds at which the oldest row of the last chunk was put.
        fell_back: why that chunk, large enough for other transports, is inline, by transport.
    """

    def __init__(self, stream_id: str, offered: Sequence[str]) -> None:
        self.stream_id = stream_id
        self.offered = tuple(offered)
        self.consumer_gone = False
        self.pending_positions = 0
        self.credits = 0
        self.oldest_put = 0.0
        self.fell_back: dict[str, str] = {}
        self._subscribed: asyncio.Future[stream_pb2.Subscription] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._sent = asyncio.Event()
        self._ended = asyncio.Event()
        self._header: stream_pb2.StreamHeader | None = None
        self._prompt_positions = 0
        self._selection: dict[str, stream_pb2.Positions] = {}  # what the consumer wants, by name; empty: all
        self._pending: deque[Rows] = deque()
        self._end: stream_pb2.StreamEnd | None = None
        self._error: StageError | None = None
        self._credit_closed = False
        self._session: TransportSession | None = None
        self._transport_name = ""
        self._min_bytes = math.inf
        self._obstacles: dict[str, str] = {}  # by transport: why there is no session

    async def subscription(self, timeout_s: float) -> list[stream_pb2.RowSelection]:
        """What the consumer wants, all rows spelled out.

        Raises:
            Unavailable: no consumer came within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):  # not `wait_for`: see rpc/requests.py
                subscription = await asyncio.shield(self._subscribed)
        except TimeoutError:
            raise Unavailable(f"nobody subscribed to stream {self.stream_id} within {timeout_s:g} s") from None
        if subscription.rows:
            return list(subscription.rows)
        return [stream_pb2.RowSelection(name=name) for name in self.offered]

    def start(self, prompt_positions: int) -> None:
        self._prompt_positions = prompt_positions
        self._header = stream_pb2.StreamHeader(prompt_positions=prompt_positions)
        self._changed.set()

    def put(self, rows: Sequence[Rows]) -> None:
        """Appends rows, on the CPU, after `start`; their tensors must not be written to any more. Of rows that the
        consumer did not ask for only whole kinds may be put, which are dropped, as are all after `fail`.

        Raises:
            ValueError: a dtype that has no DataType.
        """
        for row in rows:
            data_type(row.tensor.dtype)
        if not self.consumer_gone and self._error is None:
            now = time.monotonic()
            self._append(replace(row.compact(), put_s=now) for row in rows if len(row.tensor))
            self._changed.set()

    def _append(self, rows: Iterable[Rows]) -> None:
        for row in rows:
            if is_selected(row, self._selection, self._prompt_positions):
                self._pending.append(row)
                self.pending_positions += len(row.tensor)

    async def room(self, positions: int) -> None:
        """Waits while a consumer that has come leaves `positions` or more pending."""
        while self.pending_positions >= positions and self.taken and not self.consumer_gone:
            self._sent.clear()
            await self._sent.wait()

    def finish(self, end_position: int) -> None:
        """Completes the stream; what is pending is still sent."""
        if self._error is None:
            self._end = stream_pb2.StreamEnd(end_position=end_position)
            self._ended.set()
            self._changed.set()

    def fail(self, error: StageError) -> None:
        """Ends the stream with `error` and drops what is pending; no effect after `finish` or `fail`."""
        if self._end is None:
            self._break(error)

    def _break(self, error: StageError) -> None:
        if self._error is None:
            self._error = error
            self._pending.clear()
            self.pending_positions = 0
            self._ended.set()
            self._changed.set()
            self._sent.set()

    # The consumer's side, used by StreamHub and TensorStreamServicer.

    def accept(self, subscription: stream_pb2.Subscription, transports: Sequence[Transport]) -> None:
        """Binds the consumer. Large tensors go by the first of `transports` that it has, else inline.

        Raises:
            InvalidInput: rows that are not offered, or no credit.
        """
        for i, row in enumerate(subscription.rows):
            if row.name not in self.offered:
                raise InvalidInput(f"rows[{i}].name", f"'{row.name}' is not offered; there is {list(self.offered)}")
        self.credits = subscription.initial_credits
        self._selection = {row.name: row.positions for row in subscription.rows}
        put_before, self._pending, self.pending_positions = self._pending, deque(), 0
        self._append(put_before)
        self._subscribed.set_result(subscription)
        self._min_bytes = min((each.min_bytes for each in transports), default=math.inf)
        for each in transports:
            session, obstacle = each.negotiate(subscription.capabilities, self._tensor_done)
            if session:
                self._session, self._transport_name, self._min_bytes = session, each.name, each.min_bytes
                return
            self._obstacles[each.name] = obstacle

    def _tensor_done(self, error: StageError | None) -> None:
        if error:
            self._break(error)
        self._changed.set()

    def consumer_left(self) -> None:
        """The consumer's call has ended; what is put from now on is dropped."""
        self.consumer_gone = True
        if self._session is not None:
            self._session.consumer_left()
        self._sent.set()

    @property
    def taken(self) -> bool:
        return self._subscribed.done()

    def grant(self, chunks: int) -> None:
        self.credits += chunks
        self._changed.set()

    def release(self, lease_ids: Sequence[int]) -> None:
        """The consumer no longer reads these leases.

        Raises:
            InvalidInput: one is not of this stream.
        """
        if self._session is None:
            raise InvalidInput("credit.released", "this stream lends nothing")
        self._session.release(lease_ids)

    async def released(self) -> None:
        """Returns when the consumer is done with all that was sent beside this stream, or can no longer say so.

        Raises:
            StageError: it will not get all of it.
        """
        while self._session and self._session.outstanding and not self._credit_closed and not self._error:
            self._changed.clear()
            await self._changed.wait()
        if self._error:
            raise self._error

    def close_credit(self) -> None:
        """The consumer grants and releases nothing more."""
        self._credit_closed = True
        self._changed.set()

    async def responses(self) -> AsyncIterator[stream_pb2.SubscribeResponse]:
        """What goes out, as credit allows.

        Raises:
            StageError: what the stream failed with; InvalidInput when credit ran out for good.
        """
        subscription = self._subscribed.result()
        limit_bytes = subscription.capabilities.max_chunk_bytes or DEFAULT_CHUNK_BYTES
        gathering = subscription.gathering
        while True:
            self._changed.clear()
            if self._error:
                raise self._error
            if header := self._header:
                self._header = None
                yield stream_pb2.SubscribeResponse(header=header)
            while self._pending and self.credits:
                self.oldest_put = self._pending[0].put_s
                chunk = await self._take(limit_bytes)
                self.credits -= 1
                self._sent.set()
                yield stream_pb2.SubscribeResponse(chunk=chunk)
                if gathering.delay_ms and end_position(chunk) > self._prompt_positions + gathering.from_position:
                    await self._gather(gathering.delay_ms / 1000)
                if self._error:
                    raise self._error
            if self._end and not self._pending:
                yield stream_pb2.SubscribeResponse(end=self._end)
                return
            if self._pending and self._credit_closed:
                raise InvalidInput("credit.chunks", "the stream has more chunks than were ever granted")
            await self._changed.wait()

    async def _take(self, limit_bytes: int) -> stream_pb2.StreamChunk:
        """One large tensor beside the stream, or what fits into a message."""
        rows = self._pending[0]
        self.fell_back = {}
        if rows.tensor.nbytes >= self._min_bytes:
            if self._session is not None and (place := self._session.reserve(rows.tensor.nbytes)):
                self._pending.popleft()
                self.pending_positions -= len(rows.tensor)
                chunk = stream_pb2.StreamChunk()
                chunk.rows.add(name=rows.name, first_position=rows.first_position)
                chunk.rows[0].tensor.CopyFrom(await self._session.send(place, rows.tensor))
                return chunk
            self.fell_back = {self._transport_name: self._session.obstacle} if self._session else self._obstacles
        chunk = take_inline(self._pending, limit_bytes, self._min_bytes)
        self.pending_positions -= sum(rows.tensor.shape[0] for rows in chunk.rows)
        return chunk

    async def _gather(self, delay_s: float) -> None:
        """Waits `delay_s`, or until the stream ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._ended.wait()
