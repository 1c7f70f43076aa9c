"""Calls to a replica of a stage."""

import asyncio
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from gateway import metrics
from gateway.pipeline.delta_stream import DeltaStream, TakeDelta
from gateway.pipeline.kinds import KINDS
from gateway.pipeline.replica_health import ReplicaHealth
from quartet.v1 import media_pb2, stream_pb2
from services.common.errors import DeadlineExceeded, NotFound, RequestCancelled, StageError, StageLost, Unavailable
from services.common.rpc.channels import Channels
from services.common.rpc.status import from_rpc_error, said_by_stage
from services.common.telemetry import tracing

_MEDIA_CHUNK_BYTES = 1024 * 1024

# Error texts for clients. The stage's own text may be a transport's, and goes to the log.
_WORDS: dict[type[StageError], str] = {
    Unavailable: "cannot answer now",
    NotFound: "gave the request up",
    RequestCancelled: "gave the request up",
    DeadlineExceeded: "took longer than the request's time",
}

_choices = itertools.count(1)


class Replica(ReplicaHealth):
    """A process that serves a stage.

    Attributes:
        last_chosen: number of the choice among all choices.
    """

    def __init__(
        self, stage: str, kind: str, address: str, server_name: str, channels: Channels, on_change: Callable[[], None]
    ) -> None:
        super().__init__(stage, kind, address, server_name, channels, on_change)
        self.last_chosen = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._deltas: DeltaStream | None = None

    def call(
        self,
        start: Any,
        media: Sequence[bytes],
        timeout_s: float,
        text: AsyncIterable[str] | None = None,
        take_delta: TakeDelta | None = None,
    ) -> Any:
        """The call that serves a request.

        Args:
            start: the start message; the stream of deltas is written into it.
            media: files of the media in `start` that have no data.
            text: text that follows the text in `start`.
            take_delta: gets deltas that come outside of the call, perhaps before its first response.
        """
        kind, channel = KINDS[self.kind], self.channel

        def begin() -> Any:
            streamed = kind.streamed_request
            requests = start if streamed is None else _in_messages(streamed, start, media, text)
            return getattr(kind.stub(channel), kind.method)(requests, timeout=timeout_s, metadata=tracing.metadata())

        if take_delta is not None and kind.separates_deltas(start):
            stream = self._delta_stream(channel)
            if stream is not None:
                return stream.call(start, take_delta, begin)
        return begin()

    async def ask(self, method: str, message: Any, timeout_s: float) -> Any:
        """The response to `message`. Raises StageError."""
        try:
            return await getattr(KINDS[self.kind].stub(self.channel), method)(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self.failure(error) from error

    def _delta_stream(self, channel: grpc.aio.Channel) -> DeltaStream | None:
        """The open stream of `channel`. If there is none, opens one for later calls."""
        stream = self._deltas
        if stream is not None and not stream.has_ended and stream.channel is channel:
            return stream if stream.is_open else None
        if stream is not None:
            stream.retire()
        self._deltas = DeltaStream(channel)
        return None

    def source(self, stream_id: str) -> stream_pb2.StreamSource:
        """The place from which another stage pulls its stream `stream_id`."""
        return stream_pb2.StreamSource(address=self.address, stream_id=stream_id, server_name=self.server_name)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request of this gateway while the context lasts."""
        self.in_flight += 1
        self.last_chosen = next(_choices)
        self._idle.clear()
        metrics.CHOSEN.labels(self.stage, self.address).inc()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def idle(self) -> None:
        await self._idle.wait()

    def failure(self, error: grpc.aio.AioRpcError) -> StageError:
        """The error for clients of a call that failed here. `origin` is the kind of the stage at fault.

        A lost replica is checked at once, and gets no requests until it serves.
        """
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
