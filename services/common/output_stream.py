"""The producer's side of a tensor stream: buffers what an engine makes, sends what the consumer has credit for."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from quartet.v1 import stream_pb2
from services.common.errors import InvalidInput, RequestCancelled, StageError, Unavailable

DEFAULT_CHUNK_BYTES = 64 * 1024


class OutputStream:
    """One request's rows on their way to one consumer. For the event loop's thread only.

    `put` never blocks: an engine's step must not wait for a network. What is buffered is bounded by the request itself
    (its context length, its most frames), and where the producer can stand still by `room`; what is in flight by the
    consumer's credit.

    Attributes:
        consumer_gone: its call has ended.
        pending_positions: positions put and not sent, of all kinds of rows.
        credits: chunks that the consumer has granted and not got.
        oldest_put: when the oldest row was put of the chunk that `responses` gave last (time.monotonic() seconds).

    As a context manager: leaving without `finish` fails the stream with the StageError that is being raised, or else
    with RequestCancelled.
    """

    def __init__(self, stream_id: str, offered: Sequence[str], on_exit: Callable[["OutputStream"], None]) -> None:
        self.stream_id = stream_id
        self.offered = tuple(offered)
        self.consumer_gone = False
        self.pending_positions = 0
        self.credits = 0
        self.oldest_put = 0.0
        self._positions_put = 0
        self._put_times: deque[tuple[int, float]] = deque()  # (positions put up to then, when)
        self._on_exit = on_exit
        self._subscribed: asyncio.Future[stream_pb2.Subscription] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._sent = asyncio.Event()
        self._ended = asyncio.Event()
        self._header: stream_pb2.StreamHeader | None = None
        self._pending: deque[stream_pb2.Rows] = deque()
        self._end: stream_pb2.StreamEnd | None = None
        self._error: StageError | None = None
        self._credit_closed = False

    async def subscription(self, timeout_s: float) -> list[stream_pb2.RowSelection]:
        """What the consumer wants; a subscription to everything is spelled out.

        Raises:
            Unavailable: no consumer came within `timeout_s`.
        """
        try:
            subscription = await asyncio.wait_for(asyncio.shield(self._subscribed), timeout_s)
        except TimeoutError:
            raise Unavailable(f"nobody subscribed to stream {self.stream_id} within {timeout_s:g} s") from None
        if subscription.rows:
            return list(subscription.rows)
        return [stream_pb2.RowSelection(name=name) for name in self.offered]

    def start(self, prompt_positions: int) -> None:
        """Sends the header."""
        self._header = stream_pb2.StreamHeader(prompt_positions=prompt_positions)
        self._changed.set()

    def put(self, rows: Sequence[stream_pb2.Rows]) -> None:
        """Appends rows. Those the consumer did not ask for must not be put, except as a whole kind."""
        if not self.consumer_gone:
            rows = [row for row in rows if row.tensor.shape[0]]
            self._pending.extend(rows)
            positions = sum(row.tensor.shape[0] for row in rows)
            self.pending_positions += positions
            self._positions_put += positions
            self._put_times.append((self._positions_put, time.monotonic()))
            self._changed.set()

    async def room(self, positions: int) -> None:
        """Waits while a consumer leaves `positions` or more pending. One that has yet to come is not waited for."""
        while self.pending_positions >= positions and self.taken and not self.consumer_gone:
            self._sent.clear()
            await self._sent.wait()

    def finish(self, end_position: int) -> None:
        """Completes the stream: what is pending is still delivered."""
        if self._error is None:
            self._end = stream_pb2.StreamEnd(end_position=end_position)
            self._ended.set()
            self._changed.set()

    def fail(self, error: StageError) -> None:
        """Ends the stream with `error`; what is pending is dropped. After `finish` this does nothing."""
        if self._end is None and self._error is None:
            self._error = error
            self._pending.clear()
            self.pending_positions = 0
            self._ended.set()
            self._changed.set()
            self._sent.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        gave_up = RequestCancelled(f"the request behind stream {self.stream_id} ended early")
        self.fail(error if isinstance(error, StageError) else gave_up)
        self._on_exit(self)

    # The consumer's side, used by StreamHub and TensorStreamServicer.

    def accept(self, subscription: stream_pb2.Subscription) -> None:
        """Binds the consumer.

        Raises:
            InvalidInput: rows that are not offered, or no credit.
        """
        for i, row in enumerate(subscription.rows):
            if row.name not in self.offered:
                raise InvalidInput(f"rows[{i}].name", f"'{row.name}' is not offered; there is {list(self.offered)}")
        self.credits = subscription.initial_credits
        self._subscribed.set_result(subscription)

    def consumer_left(self) -> None:
        """Its call has ended; what is put from now on is dropped."""
        self.consumer_gone = True
        self._sent.set()

    @property
    def taken(self) -> bool:
        """Whether a consumer has subscribed."""
        return self._subscribed.done()

    def grant(self, chunks: int) -> None:
        """Adds credit."""
        self.credits += chunks
        self._changed.set()

    def close_credit(self) -> None:
        """The consumer will grant no more."""
        self._credit_closed = True
        self._changed.set()

    async def responses(self) -> AsyncIterator[stream_pb2.SubscribeResponse]:
        """What goes out, as credit allows.

        Raises:
            StageError: the error the stream failed with; InvalidInput when credit ran out for good.
        """
        subscription = self._subscribed.result()
        limit_bytes = subscription.capabilities.max_chunk_bytes or DEFAULT_CHUNK_BYTES
        wanted = {row.name: row.positions for row in subscription.rows}
        gathering = subscription.gathering
        header_sent = False
        while True:
            self._changed.clear()
            if self._error:
                raise self._error
            if self._header and not header_sent:
                header_sent = True
                yield stream_pb2.SubscribeResponse(header=self._header)
            prompt_positions = self._header.prompt_positions if self._header else 0
            while self._has_wanted(wanted, prompt_positions) and self.credits:
                self._note_oldest()
                chunk, passed = _take(self._pending, limit_bytes, wanted, prompt_positions)
                self.pending_positions -= passed
                self.credits -= 1
                self._sent.set()
                yield stream_pb2.SubscribeResponse(chunk=chunk)
                if gathering.delay_ms and _end(chunk) > gathering.from_position:
                    await self._gather(gathering.delay_ms / 1000)
                if self._error:
                    raise self._error
            if self._end and not self._pending:
                yield stream_pb2.SubscribeResponse(end=self._end)
                return
            if self._pending and self._credit_closed:
                raise InvalidInput("credit.chunks", "the stream has more chunks than were ever granted")
            await self._changed.wait()

    def _note_oldest(self) -> None:
        """Rows leave in the order they came, so positions tell which was put when."""
        passed = self._positions_put - self.pending_positions
        while self._put_times[0][0] <= passed:
            self._put_times.popleft()
        self.oldest_put = self._put_times[0][1]

    async def _gather(self, delay_s: float) -> None:
        """Lets `delay_s` pass, or less if the stream ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._ended.wait()

    def _has_wanted(self, wanted: dict[str, stream_pb2.Positions], prompt_positions: int) -> bool:
        """Whether a chunk can be made. Drops what nobody asked for: it must neither cost credit nor wait for some."""
        while self._pending and not _wanted(self._pending[0], wanted, prompt_positions):
            self.pending_positions -= self._pending.popleft().tensor.shape[0]
        return bool(self._pending)


def _take(
    pending: deque[stream_pb2.Rows], limit_bytes: int, wanted: dict[str, stream_pb2.Positions], prompt_positions: int
) -> tuple[stream_pb2.StreamChunk, int]:
    """Takes what fits into one chunk off `pending`: several small rows together, or a part of a large one. Returns it,
    and how many positions `pending` lost, those that nobody wants included."""
    chunk, room_bytes, passed = stream_pb2.StreamChunk(), limit_bytes, 0
    while pending:
        rows = pending[0]
        count = rows.tensor.shape[0]
        if not _wanted(rows, wanted, prompt_positions):
            pending.popleft()
            passed += count
            continue
        row_bytes = max(1, len(rows.tensor.inline) // count)
        fitting = min(count, room_bytes // row_bytes or (0 if chunk.rows else 1))
        if not fitting:
            break
        if fitting == count:
            chunk.rows.append(pending.popleft())
        else:
            chunk.rows.append(_slice(rows, 0, fitting))
            pending[0] = _slice(rows, fitting, count)
        room_bytes -= fitting * row_bytes
        passed += fitting
        if room_bytes <= 0:
            break
    return chunk, passed


def _end(chunk: stream_pb2.StreamChunk) -> int:
    """One past the last position in `chunk`."""
    return max(rows.first_position + rows.tensor.shape[0] for rows in chunk.rows)


def _wanted(rows: stream_pb2.Rows, wanted: dict[str, stream_pb2.Positions], prompt_positions: int) -> bool:
    """Whether `rows` is of a wanted kind and part; of an empty `wanted` all are. Engines put prompt and output rows
    apart, and select the multimodal positions themselves."""
    if not wanted:
        return True
    if rows.name not in wanted:
        return False
    positions = wanted[rows.name]
    in_prompt = rows.first_position < prompt_positions
    if positions in (stream_pb2.POSITIONS_PROMPT, stream_pb2.POSITIONS_PROMPT_MULTIMODAL):
        return in_prompt
    return not in_prompt or positions != stream_pb2.POSITIONS_OUTPUT


def _slice(rows: stream_pb2.Rows, first: int, end: int) -> stream_pb2.Rows:
    """Rows `first` to `end` of `rows`."""
    tensor = rows.tensor
    row_bytes = len(tensor.inline) // tensor.shape[0]
    part = stream_pb2.Rows(name=rows.name, first_position=rows.first_position + first)
    part.tensor.dtype = tensor.dtype
    part.tensor.shape.extend([end - first, *tensor.shape[1:]])
    part.tensor.inline = memoryview(tensor.inline)[first * row_bytes : end * row_bytes].tobytes()
    return part
