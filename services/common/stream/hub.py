"""A producer's open streams, and `quartet.v1.TensorStreamService`, which serves and counts them."""

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import grpc
import structlog

from quartet.v1 import stream_pb2, stream_pb2_grpc
from services.common import errors
from services.common.rpc.call import STAGE_KEY
from services.common.rpc.requests import check_id
from services.common.rpc.status import abort
from services.common.stream.output_stream import OutputStream
from services.common.stream.tensors import Transport, elements_bytes
from services.common.stream.ucx_worker import TAG_BITS
from services.common.telemetry import metrics, tracing

LINGER_S = 30.0
CLAIM_TIMEOUT_S = 10.0
MAX_ADDRESS_BYTES = 65536
MAX_CONSUMER_LABELS = 16  # kinds of consumers in metrics: consumers name themselves, and labels must be bounded

log = structlog.get_logger()


class StreamHub:
    """A producer's open streams. A consumer may come before its stream is opened, or up to `LINGER_S` seconds after
    the request behind it has ended.

    Attributes:
        transports: of large tensors, the preferred first; without any, all go inline.
    """

    def __init__(self) -> None:
        self.transports: list[Transport] = []
        self._streams: dict[str, OutputStream] = {}
        self._awaited: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()  # those who wait keep an event
        self._consumers = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def open(self, stream_id: str, rows: Sequence[str]) -> Generator[OutputStream]:
        """A new stream that offers `rows`. Leaving without its `finish` fails it with the StageError being raised, else
        with RequestCancelled.

        Raises:
            InvalidInput: the id is in use, or too long.
        """
        check_id("output_stream_id", stream_id)
        if stream_id in self._streams:
            raise errors.InvalidInput("output_stream_id", f"'{stream_id}' is in use; ids must be unique")
        stream = self._streams[stream_id] = OutputStream(stream_id, rows)
        if arrived := self._awaited.get(stream_id):
            arrived.set()
        try:
            yield stream
        except errors.StageError as error:
            stream.fail(error)
            raise
        finally:
            stream.fail(errors.RequestCancelled(f"the request behind stream {stream_id} ended early"))
            if not stream.taken:  # a late consumer still finds it, and how it ended, for a while
                asyncio.get_running_loop().call_later(LINGER_S, self._forget, stream)

    async def claim(self, subscription: stream_pb2.Subscription, timeout_s: float) -> OutputStream:
        """The stream of `subscription`, now bound to that consumer.

        Raises:
            NotFound: it was not opened within `timeout_s`.
            AlreadyExists: it has a consumer already.
            InvalidInput: it does not offer these rows.
        """
        stream_id = subscription.stream_id
        if stream_id not in self._streams:
            arrived = self._awaited.setdefault(stream_id, asyncio.Event())
            try:
                async with asyncio.timeout(timeout_s):  # not `wait_for`: see rpc/requests.py
                    await arrived.wait()
            except TimeoutError:
                raise errors.NotFound(f"stream {stream_id} was not opened within {timeout_s:g} s") from None
        stream = self._streams.get(stream_id)
        if stream is None or stream.taken:
            raise errors.AlreadyExists(f"stream {stream_id} has a consumer already")
        stream.accept(subscription, self.transports)
        return stream

    def consumer_came(self) -> None:
        self._consumers += 1
        self._idle.clear()

    def consumer_left(self, stream: OutputStream | None) -> None:
        self._consumers -= 1
        if not self._consumers:
            self._idle.set()
        if stream:
            stream.consumer_left()
            self._forget(stream)

    def _forget(self, stream: OutputStream) -> None:
        if self._streams.get(stream.stream_id) is stream:
            del self._streams[stream.stream_id]

    async def drain(self) -> None:
        """Returns when no consumer is served."""
        await self._idle.wait()

    @property
    def streams(self) -> list[OutputStream]:
        """The open ones. May be read from any thread."""
        return list(self._streams.values())


class TensorStreamServicer(stream_pb2_grpc.TensorStreamServiceServicer):
    """Serves the streams of `hub`."""

    def __init__(self, hub: StreamHub, stage: str) -> None:
        self._hub = hub
        self._labels = EdgeLabels(stage)
        metrics.STREAM_PENDING.labels(stage).set_function(
            lambda: sum(stream.pending_positions for stream in hub.streams)
        )
        metrics.STREAM_CREDITS.labels(stage).set_function(lambda: sum(stream.credits for stream in hub.streams))

    async def Subscribe(
        self, request_iterator: AsyncIterator[stream_pb2.SubscribeRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[stream_pb2.SubscribeResponse]:
        stream, credit_reader, counted, outcome = None, None, None, "CANCELLED"
        self._hub.consumer_came()
        try:
            # At once, so that the consumer can tell a producer that is there from one that is not.
            await context.send_initial_metadata(())
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                subscription = await _first_message(request_iterator)
            stream = await self._hub.claim(subscription, CLAIM_TIMEOUT_S)
            counted = SubscriptionMetrics(subscription.request_id, stream, context, self._labels)
            credit_reader = asyncio.create_task(_read_credit(request_iterator, stream))
            async for response in stream.responses():
                yield response
                if response.chunk.rows:
                    counted.chunk_sent(response.chunk)
            outcome = "OK"
            await stream.released()
            # The consumer may be granting credit at this moment, and a write on an ended call would fail there.
            await asyncio.wait({credit_reader}, timeout=CLAIM_TIMEOUT_S)
        except TimeoutError:
            outcome = "DEADLINE_EXCEEDED"
            await abort(context, errors.DeadlineExceeded(f"no subscription came within {CLAIM_TIMEOUT_S:g} s"))
        except errors.StageError as error:
            outcome = error.status
            await abort(context, error)
        finally:
            if counted:
                counted.end(outcome)
            if credit_reader:
                credit_reader.cancel()
            self._hub.consumer_left(stream)


async def _first_message(requests: AsyncIterator[stream_pb2.SubscribeRequest]) -> stream_pb2.Subscription:
    first = await anext(requests, None)
    if first is None or first.WhichOneof("message") != "subscription":
        raise errors.InvalidInput("message", "the first message must be a subscription")
    subscription = first.subscription
    capabilities, gathering = subscription.capabilities, subscription.gathering
    limit_bytes = capabilities.max_chunk_bytes
    for name in ("stream_id", "request_id"):
        check_id(f"subscription.{name}", getattr(subscription, name))
    errors.require(1 <= subscription.initial_credits <= 1024, "subscription.initial_credits", "must be 1 to 1024")
    fits = not limit_bytes or 1024 <= limit_bytes <= 4 * 1024 * 1024
    errors.require(fits, "subscription.capabilities.max_chunk_bytes", "must be 0 or 1024 to 4194304")
    if capabilities.HasField("ucx"):
        address, tag = capabilities.ucx.worker_address, capabilities.ucx.tag
        field, step = "subscription.capabilities.ucx", 2**TAG_BITS
        fits = 1 <= len(address) <= MAX_ADDRESS_BYTES
        errors.require(fits, f"{field}.worker_address", f"must have 1 to {MAX_ADDRESS_BYTES} bytes")
        errors.require(tag and not tag % step, f"{field}.tag", f"must be a multiple of {step} above 0")
    errors.require(gathering.from_position >= 0, "subscription.gathering.from_position", "must be at least 0")
    errors.require(gathering.delay_ms <= 1000, "subscription.gathering.delay_ms", "must be 0 to 1000")
    return subscription


async def _read_credit(requests: AsyncIterator[stream_pb2.SubscribeRequest], stream: OutputStream) -> None:
    try:
        async for request in requests:
            credit = request.credit
            if request.WhichOneof("message") != "credit" or not (credit.chunks or credit.released):
                reason = "every message after the first must grant at least 1 chunk, or release a lease"
                raise errors.InvalidInput("credit.chunks", reason)
            if credit.released:
                stream.release(credit.released)
            stream.grant(credit.chunks)
    except errors.InvalidInput as error:
        stream.fail(error)
    stream.close_credit()


class EdgeLabels:
    """The kinds of a producer's consumers: a bounded set of labels, and which edges were logged."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._consumers: set[str] = set()
        self._logged: set[tuple[str, str, tuple[tuple[str, str], ...]]] = set()

    def consumer(self, name: str) -> str:
        """The label of a consumer called `name`: "other" without a name, or after too many."""
        if name and len(self._consumers) < MAX_CONSUMER_LABELS:
            self._consumers.add(name)
        return name if name in self._consumers else "other"

    def log_route(self, consumer: str, peer: str, transport: str, fell_back: dict[str, str]) -> None:
        """Logs how large tensors go to a kind of consumer, once for each transport and its reasons."""
        route = consumer, transport, tuple(fell_back.items())
        if route not in self._logged:
            self._logged.add(route)
            reasons = {f"{other}_reason": reason for other, reason in fell_back.items()}
            log.info("edge", consumer=consumer, peer=peer, transport=transport, **reasons)


class SubscriptionMetrics:
    """The metrics and the trace span of one subscription."""

    def __init__(
        self, request_id: str, stream: OutputStream, context: grpc.aio.ServicerContext[Any, Any], labels: EdgeLabels
    ) -> None:
        headers = tracing.as_headers(context.invocation_metadata())
        self._stage, self._stream, self._peer, self._labels = labels.stage, stream, context.peer(), labels
        self._consumer = labels.consumer(headers.get(STAGE_KEY, ""))
        self._chunks = 0
        self._bytes: dict[str, int] = {}
        self._span = tracing.begin(f"{self._stage} to {self._consumer}", request_id, headers)

    def chunk_sent(self, chunk: stream_pb2.StreamChunk) -> None:
        now = time.monotonic()
        if self._span and not self._chunks:
            self._span.event("first chunk", now)
        self._chunks += 1
        transport = chunk.rows[0].tensor.WhichOneof("payload") or "inline"  # what is not inline is alone in its chunk
        waited_s = now - self._stream.oldest_put
        metrics.STREAM_CHUNK_SECONDS.labels(self._stage, self._consumer, transport).observe(waited_s)
        chunk_bytes = 0
        for rows in chunk.rows:
            # A producer that offers no kinds of rows names each of its tensors: too many for a label.
            kind = rows.name if rows.name in self._stream.offered else "tensors"
            size_bytes = elements_bytes(rows.tensor)
            metrics.STREAM_BYTES.labels(self._stage, self._consumer, kind, transport).inc(size_bytes)
            chunk_bytes += size_bytes
        self._bytes[transport] = self._bytes.get(transport, 0) + chunk_bytes
        fell_back = self._stream.fell_back
        for other, reason in fell_back.items():
            metrics.STREAM_FALLBACK_BYTES.labels(self._stage, other, reason).inc(chunk_bytes)
        if transport != "inline" or fell_back:
            self._labels.log_route(self._consumer, self._peer, transport, fell_back)

    def end(self, outcome: str) -> None:
        if self._span:
            used = "+".join(sorted(self._bytes)) or None
            self._span.set(stage=self._stage, consumer=self._consumer, transport=used, outcome=outcome)
            self._span.set(chunks=self._chunks, size_bytes=sum(self._bytes.values()))
            self._span.end("" if outcome == "OK" else outcome)
