"""The start-up that all stages share: start the engine, serve, drain."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import grpc
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from quartet.v1 import profile_pb2_grpc, server_info_pb2, server_info_pb2_grpc, stream_pb2_grpc
from services.common import failures, profiles
from services.common.engine.process import freeze_heap
from services.common.engine.recorder import TorchRecorder
from services.common.errors import Unavailable
from services.common.rpc import tls
from services.common.rpc.call import Admission
from services.common.rpc.channels import MAX_CALLS, MAX_MESSAGE_BYTES, SERVER_OPTIONS, Channels
from services.common.rpc.digest import checkpoint_digest, config_digest
from services.common.rpc.guard import GuardedServer
from services.common.rpc.settings import StageSettings
from services.common.rpc.status import abort
from services.common.stream.consumer import ConsumerTransports, StreamConsumer
from services.common.stream.hub import StreamHub, TensorStreamServicer
from services.common.stream.shared_memory import open_shared_memory
from services.common.stream.ucx import open_ucx
from services.common.telemetry import logs, tracing
from services.common.telemetry.metrics import serve_operations

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
CLEAN_UP_S = 5.0  # longest wait for an abandoned start to clean up

_Engine = TypeVar("_Engine")
_Settings = TypeVar("_Settings", bound=StageSettings)

log = structlog.get_logger()


class CannotLoad(Exception):
    """No such checkpoint or device, or files at fault."""


class Stage(server_info_pb2_grpc.ServerInfoServiceServicer):
    """One stage: its server and ServerInfo, its streams, its engine's life. Made in a running event loop; several can
    live in one process.

    Health: "" (liveness) is SERVING as soon as the port is open; `service` (readiness) is SERVING from the end of the
    warm-up to the start of the drain.

    Args:
        settings: of the stage.
        name: its kind, e.g. "talker".
        service: full name of its own service, e.g. "quartet.v1.TalkerService".
        streams: whether it produces streams.

    Attributes:
        grpc: takes the stage's servicer.
        port: 0 before `serve`.
        admission: of its requests; closed until the stage serves.
        profiles: of this process's engine, unless `start` of `serve` sets another recorder.
        hub: streams it produces.
        consumer: reads streams of others.
        resources: closed last.
        kv_cache_usage: part of the KV cache in use, 0 to 1.

    Raises:
        SystemExit: the files of its TLS settings cannot be used.
    """

    def __init__(self, settings: StageSettings, name: str, service: str, streams: bool = True) -> None:
        self._settings, self._name, self._service = settings, name, service
        self._credentials = tls.load(settings)
        calls = max(MAX_CALLS, 2 * (settings.max_running_requests + settings.max_queued_requests))
        self._server = grpc.aio.server(options=[*SERVER_OPTIONS, ("grpc.max_concurrent_streams", calls)])
        self.grpc = GuardedServer(self._server, MAX_MESSAGE_BYTES)
        self.port = 0
        self.admission = Admission(settings.max_running_requests, settings.max_queued_requests, name)
        self.profiles = profiles.Profiles(name, self.admission.spans)
        self.hub = StreamHub()
        self.resources = AsyncExitStack()
        self.kv_cache_usage: Callable[[], float] = lambda: 0.0
        ucx = open_ucx(settings)
        self.hub.transports += [ucx] if ucx else []
        reads = ConsumerTransports(settings.transports, Path(settings.shared_memory_dir), ucx)
        self.consumer = StreamConsumer(Channels(self._credentials), reads)
        self._loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[None] = self._loop.create_future()
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._info: server_info_pb2.GetServerInfoResponse | None = None
        self._revision = 0
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        server_info_pb2_grpc.add_ServerInfoServiceServicer_to_server(self, self.grpc)
        profile_pb2_grpc.add_ProfileServiceServicer_to_server(self.profiles, self.grpc)
        ours = [service, "quartet.v1.ServerInfoService", profiles.SERVICE]
        self._listed = [*ours, health.SERVICE_NAME, reflection.SERVICE_NAME]
        if streams:
            stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(self.hub, name), self.grpc)
            self._listed.append("quartet.v1.TensorStreamService")

    def describe(
        self, dtype: str, device: str, volatile: Sequence[str] = (), **facts: Any
    ) -> server_info_pb2.GetServerInfoResponse:
        """The stage's ServerInfo, with the fields `facts` of its own. Facts of its kind that are `volatile` may change
        while it serves."""
        settings = self._settings
        info = server_info_pb2.GetServerInfoResponse(
            stage=self._name,
            model=settings.model_name,
            version=version("quartet"),
            dtype=dtype.removeprefix("torch."),
            device=device,
            max_running_requests=settings.max_running_requests,
            max_queued_requests=settings.max_queued_requests,
            checkpoint_digest=checkpoint_digest(settings.model),
            **facts,
        )
        info.config_digest = config_digest(info, settings, volatile)
        return info

    @property
    def has_served(self) -> bool:
        return self._info is not None

    async def GetServerInfo(
        self, request: server_info_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> server_info_pb2.GetServerInfoResponse:
        if self._info is None:
            await abort(context, Unavailable("the stage is loading its model; retry later"))
        return self._info

    async def GetLoad(
        self, request: server_info_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> server_info_pb2.GetLoadResponse:
        return server_info_pb2.GetLoadResponse(
            serving=await self._state("/ready") == "SERVING",
            running=self.admission.running,
            queued=self.admission.queued,
            info_revision=self._revision,
            kv_cache_usage=self.kv_cache_usage(),
        )

    @contextmanager
    def revising(self) -> Iterator[server_info_pb2.GetServerInfoResponse]:
        """Its ServerInfo, to change facts that its digest does not depend on."""
        assert self._info is not None
        yield self._info
        self._revision += 1

    def request_stop(self) -> None:
        """Begins to drain; gives up while the engine is loading."""
        if not self._stop.done():
            self._stop.set_result(None)

    def fatal(self, error: BaseException) -> None:
        """The engine is beyond repair: `serve` raises `error`. May be called in any thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self._stop.done():
            self._stop.set_exception(error)

    @staticmethod
    async def load(engine: Awaitable[_Engine]) -> _Engine:
        """Awaits `engine`. Raises CannotLoad: it raised ValueError or OSError."""
        try:
            return await engine
        except (ValueError, OSError) as error:
            raise CannotLoad(failures.sentence(error)) from error

    async def serve(self, start: Callable[[], Coroutine[Any, Any, server_info_pb2.GetServerInfoResponse]]) -> None:
        """Serves until `request_stop`, then refuses new work, finishes what is in flight and stops. The port is open
        while the stage loads.

        Args:
            start: makes the engine (see `load`), warms it up, gives it to the stage's servicer and returns the server
                info (see `describe`). Requests come after that.

        Raises:
            RuntimeError: the port is taken.
            CannotLoad: `load` raised it.
            Exception: whatever `start` raised, or `fatal` was given.
        """
        await self._listen()
        # In a thread, because the kernel clears all of it.
        if shared_memory := await asyncio.to_thread(open_shared_memory, self._settings, self._name):
            self.hub.transports.insert(0, shared_memory)
        starting = asyncio.ensure_future(start())
        async with self.resources:
            try:
                await asyncio.wait({starting, self._stop}, return_when=asyncio.FIRST_COMPLETED)
                if self._stop.done():
                    await self._abandon(starting)
                self._info = info = starting.result()
                self.profiles.recorder = self.profiles.recorder or TorchRecorder()
                freeze_heap()
                self.admission.open()
                await self._health.set(self._service, SERVING)
                log.info("serving", model=self._settings.model_name, device=info.device)
                await self._stop
                await self._drain()
            finally:
                starting.cancel()
                await self.profiles.close()
                await self._health.enter_graceful_shutdown()
                await self._server.stop(grace=0.5)
                await self.consumer.channels.close_all()
                self._close_transports()
        log.info("stopped")

    async def _listen(self) -> None:
        settings = self._settings
        address = f"{settings.host}:{settings.port}"
        if self._credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, self._credentials.for_server())
        listing = reflection.aio.ReflectionServicer(self._listed)  # pyright: ignore[reportAttributeAccessIssue]
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(listing, self.grpc)
        await self._health.set("", SERVING)
        await self._health.set(self._service, NOT_SERVING)
        await self._server.start()
        if settings.metrics_port is not None:
            serve_operations(settings.host, settings.metrics_port, self._state)
        log.info("listening", address=f"{settings.host}:{self.port}", **settings.model_dump(mode="json"))

    async def _state(self, path: str) -> str:
        """gRPC's health, of the process at "/health", of the stage's service at "/ready"."""
        request = health_pb2.HealthCheckRequest(service=self._service if path == "/ready" else "")
        answer = await self._health.Check(request, None)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def _abandon(self, starting: "asyncio.Future[Any]") -> None:
        """Ends the process, whose loading thread nothing can stop and the interpreter would wait for."""
        log.info("stopped while loading")
        starting.cancel()
        await asyncio.wait({starting}, timeout=CLEAN_UP_S)
        await self._server.stop(grace=0)
        self._close_transports()
        os._exit(1 if self._stop.exception() else 0)

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._health.set(self._service, NOT_SERVING)
                log.info("draining", in_flight=self.admission.in_flight)
                await self.admission.drain()
                await self.hub.drain()
        except TimeoutError:
            log.warning("drain timed out", in_flight=self.admission.in_flight)

    def _close_transports(self) -> None:
        for transport in self.hub.transports:
            transport.close()


def main(
    settings: _Settings,
    name: str,
    service: str,
    serve: Callable[[Stage, _Settings], Coroutine[Any, Any, None]],
    streams: bool = True,
) -> None:
    """Entry point of a stage's process: logs, traces, uvloop; `serve` until SIGTERM or SIGINT.

    A failed start's cause is the last line of the log (`failures.EVENT`); the exit status is 2 where something that the
    settings name is at fault, else 1. Its traceback is logged before, at level debug or with QUARTET_TRACEBACKS=1.

    Args:
        name, service, streams: see `Stage`.
        serve: calls `Stage.serve`.
    """
    started: list[Stage] = []

    async def run() -> None:
        stage = Stage(settings, name, service, streams)
        started.append(stage)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stage.request_stop)
        await serve(stage, settings)

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler: its lines are in no format
    logs.configure(settings.log_level, name)
    tracing.configure(name)
    try:
        uvloop.run(run())
    except Exception as error:
        if any(stage.has_served for stage in started):
            raise
        level = logging.INFO if failures.shows_tracebacks() else logging.DEBUG
        log.log(level, "where it failed", exc_info=error)
        cause = str(error) if isinstance(error, CannotLoad) else failures.sentence(error)
        log.critical(failures.EVENT, model=settings.model, error=cause)
        sys.exit(2 if isinstance(error, CannotLoad) else 1)
