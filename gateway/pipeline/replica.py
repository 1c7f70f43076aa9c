"""Calls to a replica of a stage."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from gateway.pipeline.delta_stream import DeltaStream, TakeDelta
from gateway.pipeline.kinds import KINDS
from gateway.pipeline.replica_health import ReplicaHealth
from quartet.v1 import media_pb2, stream_pb2
from services.common.errors import DeadlineExceeded, NotFound, RequestCancelled, StageError, StageLost, Unavailable
from services.common.rpc.status import from_rpc_error, said_by_stage
from services.common.telemetry import tracing

_MEDIA_CHUNK_BYTES = 1024 * 1024

# Error texts for clients. The stage's own text goes to the log.
_WORDS: dict[type[StageError], str] = {
    Unavailable: "cannot answer now",
    NotFound: "gave the request up",
    RequestCancelled: "gave the request up",
    DeadlineExceeded: "took longer than the request's time",
}


class Replica(ReplicaHealth):
    """A process that serves a stage."""

    _deltas: DeltaStream | None = None

    def call(
        self,
        start: Any,
        media: Sequence[bytes],
        timeout_s: float,
        text: AsyncIterable[str] | None = None,
        take_delta: TakeDelta | None = None,
        method: str = "",
    ) -> Any:
        """The call that serves a request.

        Args:
            start: start message; gets the stream of deltas.
            media: files of the media in `start` that have no data.
            text: follows the text in `start`.
            take_delta: gets deltas that come outside of the call, perhaps before its first response.
            method: another one than that of the kind.
        """
        kind, channel = KINDS[self.kind], self.channel

        def begin() -> Any:
            streamed = kind.streamed_request
            requests = start if streamed is None else _in_messages(streamed, start, media, text)
            return getattr(kind.stub(channel), method or kind.method)(
                requests, timeout=timeout_s, metadata=tracing.metadata()
            )

        if take_delta is None or not kind.separates_deltas(start) or (stream := self._delta_stream(channel)) is None:
            return begin()
        return stream.call(start, take_delta, begin)

    async def ask(self, method: str, message: Any, timeout_s: float) -> Any:
        """The response to `message`. Raises StageError."""
        try:
            return await getattr(KINDS[self.kind].stub(self.channel), method)(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self.failure(error) from error

    def _delta_stream(self, channel: grpc.aio.Channel) -> DeltaStream | None:
        """The open stream of `channel`; without one, opens it for later calls."""
        stream = self._deltas
        if stream is not None and not stream.has_ended and stream.channel is channel:
            return stream if stream.is_open else None
        if stream is not None:
            stream.retire()
        self._deltas = DeltaStream(channel)
        return None

    def source(self, stream_id: str) -> stream_pb2.StreamSource:
        """Where another stage pulls this stream."""
        return stream_pb2.StreamSource(address=self.address, stream_id=stream_id, server_name=self.server_name)

    def failure(self, error: grpc.aio.AioRpcError) -> StageError:
        """The error for clients of a call that failed here. `origin` is the kind of the stage at fault.

        A lost replica is checked at once, and gets no requests until it serves."""
        reason = from_rpc_error(error, self.kind)
        if isinstance(reason, Unavailable):
            self.doubt()
            if not said_by_stage(error):
                self.lose(error.details() or "")
        if reason.origin not in KINDS:  # a stage's own text there is not for clients either
            reason.origin = self.kind
        return self._for_clients(reason)

    def _for_clients(self, reason: StageError) -> StageError:
        if isinstance(reason, StageLost):
            return StageLost(reason.origin, f"{self.kind} {self.address}: {reason.detail}")
        if (words := _WORDS.get(type(reason))) is None:
            return reason
        error = type(reason)(f"the {reason.origin} {words}")
        error.origin, error.detail = reason.origin, f"{self.kind} {self.address}: {reason} {reason.detail}".rstrip()
        return error


async def _in_messages(
    request: Callable[..., Any], start: Any, media: Sequence[bytes], text: AsyncIterable[str] | None
) -> AsyncIterator[Any]:
    yield request(start=start)
    for file in media:
        for begin in range(0, len(file), _MEDIA_CHUNK_BYTES):
            yield request(media=media_pb2.MediaChunk(data=file[begin : begin + _MEDIA_CHUNK_BYTES]))
    if text is not None:
        async for piece in text:
            yield request(text=piece)
