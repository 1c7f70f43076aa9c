"""What is counted and told of one subscription: metrics, a span, and by which way large tensors go."""

import time

import grpc
import structlog

from quartet.v1 import stream_pb2
from services.common.rpc.call import STAGE_KEY
from services.common.stream.output_stream import OutputStream
from services.common.stream.tensors import elements_bytes
from services.common.telemetry import metrics, tracing

_STAGES = ("thinker", "talker", "code2wav", "dit", "encoder")

Told = set[tuple[str, str, tuple[tuple[str, str], ...]]]
"""What a producer has logged of its edges: (consumer, transport, why not others)."""

log = structlog.get_logger()


class Edge:
    """One subscription, to `stream`.

    Args:
        told: by all edges of the producer; each way of a large tensor to a kind of consumer is logged once.
    """

    def __init__(
        self,
        stage: str,
        subscription: stream_pb2.Subscription,
        stream: OutputStream,
        context: grpc.aio.ServicerContext,
        told: Told,
    ) -> None:
        headers = tracing.as_headers(context.invocation_metadata())
        consumer = headers.get(STAGE_KEY, "")
        self._stage, self._stream, self._peer, self._told = stage, stream, context.peer(), told
        self._consumer = consumer if consumer in _STAGES else "other"
        self._chunks = 0
        self._bytes: dict[str, int] = {}
        self._span = tracing.begin(f"{stage} to {self._consumer}", subscription.request_id, headers)

    def sent(self, chunk: stream_pb2.StreamChunk) -> None:
        """A chunk has left."""
        now = time.monotonic()
        if self._span and not self._chunks:
            self._span.event("first chunk", now)
        self._chunks += 1
        transport = chunk.rows[0].tensor.WhichOneof("payload") or "inline"  # what is not inline is alone in its chunk
        metrics.STREAM_CHUNK_SECONDS.labels(self._stage, self._consumer, transport).observe(
            now - self._stream.oldest_put
        )
        chunk_bytes = 0
        for rows in chunk.rows:
            # A producer that offers no kinds of rows names each of its tensors: too many for a label.
            kind = rows.name if rows.name in self._stream.offered else "tensors"
            size_bytes = elements_bytes(rows.tensor)
            metrics.STREAM_BYTES.labels(self._stage, self._consumer, kind, transport).inc(size_bytes)
            chunk_bytes += size_bytes
        self._bytes[transport] = self._bytes.get(transport, 0) + chunk_bytes
        for other, reason in self._stream.fell_back.items():
            metrics.STREAM_FALLBACK_BYTES.labels(self._stage, other, reason).inc(chunk_bytes)
        if transport != "inline" or self._stream.fell_back:
            self._tell(transport, self._stream.fell_back)

    def _tell(self, transport: str, reasons: dict[str, str]) -> None:
        way = self._consumer, transport, tuple(reasons.items())
        if way not in self._told:
            self._told.add(way)
            why = {f"{other}_reason": reason for other, reason in reasons.items()}
            log.info("edge", consumer=self._consumer, peer=self._peer, transport=transport, **why)

    def end(self, outcome: str) -> None:
        """Ends the span, if there are traces."""
        if self._span:
            used = "+".join(sorted(self._bytes)) or None
            self._span.set(stage=self._stage, consumer=self._consumer, transport=used, outcome=outcome)
            self._span.set(chunks=self._chunks, size_bytes=sum(self._bytes.values()))
            self._span.end("" if outcome == "OK" else outcome)
