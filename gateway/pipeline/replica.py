"""One replica of a stage: its channel, and what is known of its health, identity and load."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway import metrics
from gateway.pipeline.delta_stream import DeltaStream, TakeDelta
from gateway.pipeline.kinds import KINDS
from quartet.v1 import media_pb2, server_info_pb2, server_info_pb2_grpc, stream_pb2
from services.common.errors import DeadlineExceeded, NotFound, RequestCancelled, StageError, StageLost, Unavailable
from services.common.rpc.channels import Channels
from services.common.rpc.status import from_rpc_error, said_by_stage
from services.common.telemetry import tracing

# Health checks in a row without an answer before a replica that was serving counts as down: a busy machine may be late.
# One whose connection is refused or reset is down at once.
LATE_CHECKS = 3
_MEDIA_CHUNK_BYTES = 1024 * 1024
_NOT_CHECKED = "not checked yet"

# What clients hear of a stage instead of its own words, which may be a transport's; those are for the log.
_WORDS: dict[type[StageError], str] = {
    Unavailable: "cannot answer now",
    NotFound: "gave the request up",
    RequestCancelled: "gave the request up",
    DeadlineExceeded: "took longer than the request's time",
}

Identity = tuple[str, str]  # model, digest of its config

_choices = itertools.count(1)
log = structlog.get_logger()


class Replica:
    """A process that serves a stage.

    Args:
        stage: name of the stage.
        kind: of the stage.
        address: "ip:port", by which other stages reach it too.
        server_name: that its certificate must have, with TLS; "" is the address's host.
        channels: of this gateway.
        on_change: called when its health or identity has changed.

    Attributes:
        health: "SERVING", or else why not, in words for people.
        refusal: why it gets no requests although it is healthy; None if it gets some.
        info: what it said of itself when it was last found serving; None before that.
        down_since: `time.monotonic()` when it was last found not serving; None while it serves.
        running, queued: requests that it said to work on, and to have waiting.
        kv_cache_usage: part of its KV cache that it said to use, 0 to 1.
        in_flight: requests that this gateway has there.
        faults: calls that ended because it is gone, or takes no requests.
        last_chosen: rises with every choice.
    """

    def __init__(
        self, stage: str, kind: str, address: str, server_name: str, channels: Channels, on_change: Callable[[], None]
    ) -> None:
        self.stage, self.kind, self.address, self.server_name = stage, kind, address, server_name
        self.health = _NOT_CHECKED
        self.refusal: str | None = None
        self.info: server_info_pb2.GetServerInfoResponse | None = None
        self.down_since: float | None = time.monotonic()
        self.running = self.queued = self.in_flight = self.faults = self.last_chosen = 0
        self.kv_cache_usage = 0.0
        self._of_others = self._losses = self._revision = 0
        self._channels, self._on_change = channels, on_change
        self._check_now = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._late = 0
        self._deltas: DeltaStream | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel for a call that begins now."""
        return self._channels.channel(self.address, self.server_name)

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
            start: the start message.
            media: files of `start` whose data it has not, in their order.
            timeout_s: longest that the call may take.
            text: what follows of the text in `start`.
            take_delta: is told the deltas of a kind that has a stream for them, if that is open: then they are not in
                the call. Before the first response, too.
        """
        kind, channel = KINDS[self.kind], self.channel

        def begin() -> Any:
            streamed = kind.streamed_request
            requests = start if streamed is None else _in_messages(streamed, start, media, text)
            return getattr(kind.stub(channel), kind.method)(requests, timeout=timeout_s, metadata=tracing.metadata())

        if kind.streams_deltas:
            start.ClearField("deltas_to")  # of the replica before
            if take_delta is not None and (stream := self._delta_stream(channel)) is not None:
                return stream.call(start, take_delta, begin)
        return begin()

    def _delta_stream(self, channel: grpc.aio.Channel) -> DeltaStream | None:
        """The one of `channel`, if it is open; else it is opened for the calls to come."""
        stream = self._deltas
        if stream is not None and not stream.has_ended and stream.channel is channel:
            return stream if stream.is_open else None
        if stream is not None:
            stream.retire()
            if stream.is_unknown and stream.channel is channel:
                return None
        self._deltas = DeltaStream(channel)
        return None

    def source(self, stream_id: str) -> stream_pb2.StreamSource:
        """By which another stage pulls the stream `stream_id` from it."""
        return stream_pb2.StreamSource(address=self.address, stream_id=stream_id, server_name=self.server_name)

    @property
    def identity(self) -> Identity | None:
        """What all replicas of a stage must have in common; None while it was never found serving."""
        return (self.info.model, self.info.config_digest) if self.info else None

    @property
    def loras(self) -> dict[str, str]:
        """The adapters that requests there may name, and the digest of each one's files."""
        return {lora.name: lora.digest for lora in self.info.thinker.loras} if self.info else {}

    @property
    def healthy(self) -> bool:
        """Whether it says that it serves."""
        return self.health == "SERVING"

    @property
    def was_checked(self) -> bool:
        """Whether its health has been found out, whatever it was."""
        return self.health != _NOT_CHECKED

    @property
    def serving(self) -> bool:
        """Whether requests may be sent to it."""
        return self.healthy and self.refusal is None

    @property
    def state(self) -> str:
        """ "SERVING", or else why it gets no requests."""
        return self.refusal if self.healthy and self.refusal else self.health

    @property
    def load(self) -> int:
        """Requests it runs and queues: those of others when it last told, and ours now."""
        return self._of_others + self.in_flight

    @contextmanager
    def request(self) -> Iterator[None]:
        """While a request of ours is there."""
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
        """Returns when no request of ours is there."""
        await self._idle.wait()

    def failure(self, error: grpc.aio.AioRpcError) -> StageError:
        """Why a call to this replica failed, in words for clients; its `origin` is the kind of the stage that is to
        blame. A replica that is lost gets no more until a health check, made at once, finds it serving."""
        reason = from_rpc_error(error, self.kind)
        if isinstance(reason, Unavailable):
            self.doubt()
            if not said_by_stage(error):
                self._losses += 1
                self._set_health(f"lost: {error.details()}")
        if reason.origin not in KINDS:  # what a stage writes there is not for clients either
            reason.origin = self.kind
        return self._in_our_words(reason)

    def _in_our_words(self, reason: StageError) -> StageError:
        if isinstance(reason, StageLost):
            return StageLost(reason.origin, f"{self.kind} {self.address}: {reason.detail}")
        if (words := _WORDS.get(type(reason))) is None:
            return reason
        told = type(reason)(f"the {reason.origin} {words}")
        told.origin, told.detail = reason.origin, f"{self.kind} {self.address}: {reason} {reason.detail}".rstrip()
        return told

    def doubt(self) -> None:
        """It may be gone, or take no requests: its health is checked at once."""
        self.faults += 1
        self._check_now.set()

    async def watch(self, interval_s: float, timeout_s: float) -> None:
        """Checks it for ever, every `interval_s`."""
        while True:
            await self.check(timeout_s)
            try:
                async with asyncio.timeout(interval_s):
                    await self._check_now.wait()
            except TimeoutError:
                continue
            self._check_now.clear()

    async def check(self, timeout_s: float) -> None:
        """Asks for its health, its load and, where it may have changed, its identity."""
        was_healthy, losses = self.healthy, self._losses
        info: server_info_pb2.GetServerInfoResponse | None = None  # asked anew: checks may overtake each other
        try:
            load = await self._ask_load(timeout_s)
            health = await self._ask_health(load, timeout_s)
            if health == "SERVING" and (not was_healthy or self.info is None or load.info_revision != self._revision):
                server = server_info_pb2_grpc.ServerInfoServiceStub(self.channel)
                info = await server.GetServerInfo(server_info_pb2.GetServerInfoRequest(), timeout=timeout_s)
                self._revision = load.info_revision
        except grpc.aio.AioRpcError as error:
            self._late = self._late + 1 if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED else LATE_CHECKS
            if was_healthy and self._late < LATE_CHECKS:
                return
            health = f"{error.code().name} at {self.address}"
            if self._channels.credentials:  # what is wrong with a certificate is said nowhere else
                health += f" ({(error.details() or '').rpartition('last error: ')[2]})"
        else:
            self._late = 0
            if losses != self._losses:  # lost meanwhile: the answer may be from before, and it is asked again
                return
        self._set_health(health, info)

    async def _ask_load(self, timeout_s: float) -> server_info_pb2.GetLoadResponse:
        """Asks what it has to do."""
        ours_before, server = self.in_flight, server_info_pb2_grpc.ServerInfoServiceStub(self.channel)
        try:
            load = await server.GetLoad(server_info_pb2.GetLoadRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            # an older stage has no such call: then what we have there is all that is known
            return server_info_pb2.GetLoadResponse()
        self.running, self.queued, self.kv_cache_usage = load.running, load.queued, load.kv_cache_usage
        # Ours are among those that it told. What came or went in the meantime may be on either side of the count.
        self._of_others = max(0, load.running + load.queued - max(ours_before, self.in_flight))
        metrics.LOAD.labels(self.stage, self.address).set(self.load)
        return load

    async def _ask_health(self, load: server_info_pb2.GetLoadResponse, timeout_s: float) -> str:
        """The name of its health: `load` says it, or else its health service does."""
        if load.HasField("serving"):
            return "SERVING" if load.serving else "NOT_SERVING"
        request = health_pb2.HealthCheckRequest(service=KINDS[self.kind].service)
        stub = health_pb2_grpc.HealthStub(self.channel)
        response = await stub.Check(request, timeout=timeout_s)  # pyright: ignore[reportAttributeAccessIssue]
        return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)

    def _set_health(self, health: str, info: server_info_pb2.GetServerInfoResponse | None = None) -> None:
        info = info or self.info
        changed = health != self.health or info != self.info
        if health != self.health:
            log.info("stage state", name=self.stage, address=self.address, state=health, before=self.health)
        self.health, self.info = health, info
        if self.healthy:
            if self.down_since is not None and self._deltas is not None and self._deltas.is_unknown:
                self._deltas = None  # it may have been replaced by a newer one
            self.down_since = None
        elif self.down_since is None:
            self.down_since = time.monotonic()
        if changed or self.refusal:
            self._on_change()


async def _in_messages(
    request: Callable[..., Any], start: Any, media: Sequence[bytes], text: AsyncIterable[str] | None
) -> AsyncIterator[Any]:
    """`start`, then the files, then the text, as messages that `request` makes."""
    yield request(start=start)
    for file in media:
        for begin in range(0, len(file), _MEDIA_CHUNK_BYTES):
            yield request(media=media_pb2.MediaChunk(data=file[begin : begin + _MEDIA_CHUNK_BYTES]))
    if text is not None:
        async for piece in text:
            yield request(text=piece)
