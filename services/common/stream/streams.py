"""The open streams of a producer, and `quartet.v1.TensorStreamService`, which serves them to consumers."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc

from quartet.v1 import stream_pb2, stream_pb2_grpc
from services.common.rpc.call import grpc_status_name
from services.common.rpc.errors import AlreadyExists, DeadlineExceeded, InvalidInput, NotFound, StageError
from services.common.rpc.status import abort
from services.common.stream.carriers import Carriers
from services.common.stream.edge import Edge, Told
from services.common.stream.output_stream import OutputStream
from services.common.stream.ucx.arrivals import TAG_BITS
from services.common.telemetry import metrics

LINGER_S = 30.0
CLAIM_TIMEOUT_S = 10.0

MAX_ADDRESS_BYTES = 65536


class StreamHub:
    """The open streams of a producer, by id. A consumer may come before its stream is opened, or (for `LINGER_S`
    seconds) after the request behind it has ended.

    Attributes:
        carriers: by which large tensors go, the first that a consumer can have; none: all goes inline.
    """

    def __init__(self) -> None:
        self.carriers: list[Carriers] = []
        self._streams: dict[str, OutputStream] = {}
        self._awaited: dict[str, set[asyncio.Event]] = {}
        self._consumers = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, stream_id: str, rows: Sequence[str]) -> OutputStream:
        """A new stream that offers `rows`.

        Raises:
            InvalidInput: the id is in use.
        """
        if stream_id in self._streams:
            raise InvalidInput("output_stream_id", f"'{stream_id}' is in use; ids must be unique")
        stream = self._streams[stream_id] = OutputStream(stream_id, rows, on_exit=self._request_ended)
        for arrived in self._awaited.get(stream_id, ()):
            arrived.set()
        return stream

    async def claim(self, subscription: stream_pb2.Subscription, timeout_s: float) -> OutputStream:
        """The stream of `subscription`, now bound to that consumer.

        Raises:
            NotFound: it was not opened within `timeout_s`.
            AlreadyExists: it has a consumer already.
            InvalidInput: it does not offer what is asked for.
        """
        stream_id = subscription.stream_id
        if stream_id not in self._streams:
            arrived = asyncio.Event()
            self._awaited.setdefault(stream_id, set()).add(arrived)
            try:
                await asyncio.wait_for(arrived.wait(), timeout_s)
            except TimeoutError:
                raise NotFound(f"stream {stream_id} was not opened within {timeout_s:g} s") from None
            finally:
                self._awaited[stream_id].discard(arrived)
                if not self._awaited[stream_id]:
                    del self._awaited[stream_id]
        stream = self._streams.get(stream_id)
        if stream is None or stream.taken:
            raise AlreadyExists(f"stream {stream_id} has a consumer already")
        stream.accept(subscription)
        stream.carry_by(self.carriers)
        return stream

    def consumer_came(self) -> None:
        """A consumer's call began."""
        self._consumers += 1
        self._idle.clear()

    def consumer_left(self, stream: OutputStream | None) -> None:
        """A consumer's call ended: its stream, if any, is done with."""
        self._consumers -= 1
        if not self._consumers:
            self._idle.set()
        if stream:
            stream.consumer_left()
            self._forget(stream)

    def _request_ended(self, stream: OutputStream) -> None:
        """A late consumer still finds the stream, and how it ended, for a while."""
        if not stream.taken:
            asyncio.get_running_loop().call_later(LINGER_S, self._forget, stream)

    def _forget(self, stream: OutputStream) -> None:
        if self._streams.get(stream.stream_id) is stream:
            del self._streams[stream.stream_id]

    @property
    def transports(self) -> list[stream_pb2.Transport]:
        """What its streams may go by."""
        return [stream_pb2.TRANSPORT_INLINE, *(each.offered for each in self.carriers)]

    async def drain(self) -> None:
        """Returns when no consumer is being served."""
        await self._idle.wait()

    @property
    def pending_positions(self) -> int:
        """Positions that wait for their consumers' credit, of all streams. May be read from any thread."""
        return sum(stream.pending_positions for stream in list(self._streams.values()))

    @property
    def credits(self) -> int:
        """Chunks that consumers have granted and not got. May be read from any thread."""
        return sum(stream.credits for stream in list(self._streams.values()))

    def __len__(self) -> int:
        return len(self._streams)


class TensorStreamServicer(stream_pb2_grpc.TensorStreamServiceServicer):
    """Serves the streams of `hub`."""

    def __init__(self, hub: StreamHub, stage: str) -> None:
        self._hub = hub
        self._stage = stage
        self._told: Told = set()
        metrics.STREAM_PENDING.labels(stage).set_function(lambda: hub.pending_positions)
        metrics.STREAM_CREDITS.labels(stage).set_function(lambda: hub.credits)

    async def Subscribe(
        self,
        request_iterator: AsyncIterator[stream_pb2.SubscribeRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[stream_pb2.SubscribeResponse]:
        stream, credit_reader, edge, outcome = None, None, None, "CANCELLED"
        self._hub.consumer_came()
        try:
            # At once, so that the consumer can tell a producer that is there from one that is not.
            await context.send_initial_metadata(())
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                subscription = await _first_message(request_iterator)
            stream = await self._hub.claim(subscription, CLAIM_TIMEOUT_S)
            edge = Edge(self._stage, subscription, stream, context, self._told)
            credit_reader = asyncio.create_task(_read_credit(request_iterator, stream))
            async for response in stream.responses():
                yield response
                if response.chunk.rows:
                    edge.sent(response.chunk)
            outcome = "OK"
            await stream.released()
            # The consumer may be granting credit at this moment, and a write on an ended call would fail there.
            await asyncio.wait({credit_reader}, timeout=CLAIM_TIMEOUT_S)
        except TimeoutError:
            outcome = "DEADLINE_EXCEEDED"
            await abort(context, DeadlineExceeded(f"no subscription came within {CLAIM_TIMEOUT_S:g} s"))
        except StageError as error:
            outcome = grpc_status_name(error)
            await abort(context, error)
        finally:
            if edge:
                edge.end(outcome)
            if credit_reader:
                credit_reader.cancel()
            self._hub.consumer_left(stream)


async def _first_message(requests: AsyncIterator[stream_pb2.SubscribeRequest]) -> stream_pb2.Subscription:
    async for request in requests:
        if request.WhichOneof("message") != "subscription":
            raise InvalidInput("message", "the first message must be a subscription")
        subscription = request.subscription
        for field in ("stream_id", "request_id"):
            if not getattr(subscription, field):
                raise InvalidInput(f"subscription.{field}", "is required")
        if not 1 <= subscription.initial_credits <= 1024:
            raise InvalidInput("subscription.initial_credits", "must be 1 to 1024")
        limit_bytes = subscription.capabilities.max_chunk_bytes
        if limit_bytes and not 1024 <= limit_bytes <= 4 * 1024 * 1024:
            raise InvalidInput("subscription.capabilities.max_chunk_bytes", "must be 0 or 1024 to 4194304")
        if subscription.capabilities.HasField("ucx"):
            _check_inbox(subscription.capabilities.ucx)
        gathering = subscription.gathering
        if gathering.from_position < 0:
            raise InvalidInput("subscription.gathering.from_position", "must be at least 0")
        if gathering.delay_ms > 1000:
            raise InvalidInput("subscription.gathering.delay_ms", "must be 0 to 1000")
        return subscription
    raise InvalidInput("message", "the first message must be a subscription")


def _check_inbox(inbox: stream_pb2.UcxInbox) -> None:
    field = "subscription.capabilities.ucx"
    if not 1 <= len(inbox.worker_address) <= MAX_ADDRESS_BYTES:
        raise InvalidInput(f"{field}.worker_address", f"must have 1 to {MAX_ADDRESS_BYTES} bytes")
    if not inbox.tag or inbox.tag % 2**TAG_BITS:
        raise InvalidInput(f"{field}.tag", f"must be a multiple of {2**TAG_BITS} above 0")


async def _read_credit(requests: AsyncIterator[stream_pb2.SubscribeRequest], stream: OutputStream) -> None:
    try:
        async for request in requests:
            credit = request.credit
            if request.WhichOneof("message") != "credit" or not (credit.chunks or credit.released):
                reason = "every message after the first must grant at least 1 chunk, or release a lease"
                raise InvalidInput("credit.chunks", reason)
            if credit.released:
                stream.release(credit.released)
            stream.grant(credit.chunks)
    except InvalidInput as error:
        stream.fail(error)
    stream.close_credit()
