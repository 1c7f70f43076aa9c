"""A stage's gRPC server: health, reflection, server info, drain."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from importlib.metadata import version
from typing import Any

import grpc
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quartet.v1 import server_info_pb2, server_info_pb2_grpc, stream_pb2, stream_pb2_grpc
from services.common.engine.process import freeze_heap
from services.common.rpc import channels, tls
from services.common.rpc.call import Admission
from services.common.rpc.digest import checkpoint_digest, config_digest
from services.common.rpc.errors import Unavailable
from services.common.rpc.settings import StageSettings
from services.common.rpc.status import abort
from services.common.stream.consumer import set_consumer_transports
from services.common.stream.hub import StreamHub
from services.common.stream.service import TensorStreamServicer
from services.common.stream.shared_memory import open_shared_memory
from services.common.stream.ucx import UcxTransport, open_ucx_worker
from services.common.telemetry import logs, tracing
from services.common.telemetry.operations import serve_operations

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GIVE_BACK_S = 5.0  # longest wait for what an abandoned start has taken

log = structlog.get_logger()


class StageServer:
    """The server around one stage's servicer.

    Health: "" (liveness) is SERVING as soon as the port is open; `service_name` (readiness) is SERVING from the end of
    the warm-up until the drain begins.

    Args:
        settings: the stage's settings.
        stage: its kind, e.g. "talker".
        service_name: full name of the stage's own service, e.g. "quartet.v1.TalkerService".
        streams: whether the stage produces streams for others.

    Raises:
        SystemExit: the files of its TLS settings cannot be used.
    """

    def __init__(self, settings: StageSettings, stage: str, service_name: str, streams: bool = True) -> None:
        self.settings = settings
        self.stage = stage
        self.service_name = service_name
        self.grpc = grpc.aio.server(options=channels.SERVER_OPTIONS)
        self.admission = Admission(settings.max_running_requests, settings.max_queued_requests, stage)
        self.hub = StreamHub()
        ucx = open_ucx_worker(settings)
        self.hub.transports += [UcxTransport(ucx, settings.ucx_min_bytes)] if ucx else []
        set_consumer_transports(settings.transports, settings.shared_memory_dir, ucx)
        self.port = 0
        self._credentials = tls.load(settings)
        channels.use(self._credentials)
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._info = _ServerInfoServicer(self.admission)
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        names = [service_name, "quartet.v1.ServerInfoService"]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        server_info_pb2_grpc.add_ServerInfoServiceServicer_to_server(self._info, self.grpc)
        if streams:
            stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(self.hub, stage), self.grpc)
            names.append(stream_pb2.DESCRIPTOR.services_by_name["TensorStreamService"].full_name)
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc)

    def describe(self, dtype: str, device: str, **facts: Any) -> server_info_pb2.GetServerInfoResponse:
        """The stage's ServerInfo: what all stages have, and `facts`, the fields of its own."""
        info = server_info_pb2.GetServerInfoResponse(
            stage=self.stage,
            model=self.settings.model_name,
            version=version("quartet"),
            dtype=dtype.removeprefix("torch."),
            device=device,
            max_running_requests=self.settings.max_running_requests,
            max_queued_requests=self.settings.max_queued_requests,
            checkpoint_digest=checkpoint_digest(self.settings.model),
            **facts,
        )
        info.config_digest = config_digest(info, self.settings)
        return info

    def fatal(self, error: BaseException) -> None:
        """The engine is beyond repair: the process ends with an error, so that whoever supervises it starts another."""
        if not self._stop.done():
            self._stop.set_exception(error)

    async def run(self, start: Callable[[], Awaitable[server_info_pb2.GetServerInfoResponse]]) -> None:
        """Serves until SIGTERM or SIGINT, then drains: refuses new work, finishes what is in flight, stops.

        Args:
            start: loads the engine, runs one warm-up request, returns the server info. The port is open meanwhile.

        Raises:
            RuntimeError: the port is taken.
            Exception: whatever `start` raised, or `fatal` was given.
        """
        settings = self.settings
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._request_stop)
        self.port = self._add_port(f"{settings.host}:{settings.port}")
        await self._health.set("", SERVING)
        await self._health.set(self.service_name, NOT_SERVING)
        await self.grpc.start()
        if settings.metrics_port is not None:
            serve_operations(settings.host, settings.metrics_port, self._state)
        log.info("listening", address=f"{settings.host}:{self.port}", **settings.loggable())

        if shared_memory := await asyncio.to_thread(
            open_shared_memory, settings, self.stage
        ):  # the kernel clears all of it
            self.hub.transports.insert(0, shared_memory)
        starting = asyncio.ensure_future(start())
        try:
            await asyncio.wait({starting, self._stop}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.done():
                await self._abandon_loading(starting)
            self._info.info = starting.result()
            freeze_heap()
            self.admission.open()
            await self._health.set(self.service_name, SERVING)
            log.info("serving", model=settings.model_name, device=self._info.info.device)
            await self._stop
            await self._drain()
        finally:
            starting.cancel()
            await self._health.enter_graceful_shutdown()
            await self.grpc.stop(grace=0.5)
            await channels.close_all()
            self._close_transports()
        log.info("stopped")

    async def _state(self, path: str) -> str:
        """gRPC's health as HTTP has it: of the process at "/health", of the stage's service at "/ready"."""
        request = health_pb2.HealthCheckRequest(service=self.service_name if path == "/ready" else "")
        answer = await self._health.Check(request, None)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def _add_port(self, address: str) -> int:
        if self._credentials is None:
            return self.grpc.add_insecure_port(address)
        return self.grpc.add_secure_port(address, self._credentials.for_server())

    def _request_stop(self) -> None:
        if not self._stop.done():
            self._stop.set_result(None)

    def _close_transports(self) -> None:
        for transport in self.hub.transports:
            transport.close()

    async def _abandon_loading(self, starting: "asyncio.Future[Any]") -> None:
        """Ends the process: loading goes on in a thread, which nothing can stop and the interpreter would wait for."""
        log.info("stopped while loading")
        starting.cancel()
        await asyncio.wait({starting}, timeout=GIVE_BACK_S)  # it removes its files
        await self.grpc.stop(grace=0)
        self._close_transports()
        os._exit(1 if self._stop.exception() else 0)

    async def _drain(self) -> None:
        await self._health.set(self.service_name, NOT_SERVING)
        log.info("draining", in_flight=self.admission.in_flight)
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self.admission.drain()
                await self.hub.drain()
        except TimeoutError:
            log.warning("drain timed out", in_flight=self.admission.in_flight)


class _ServerInfoServicer(server_info_pb2_grpc.ServerInfoServiceServicer):
    def __init__(self, admission: Admission) -> None:
        self.info: server_info_pb2.GetServerInfoResponse | None = None
        self._admission = admission

    async def GetServerInfo(
        self, request: server_info_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> server_info_pb2.GetServerInfoResponse:
        if self.info is None:
            await abort(context, Unavailable("the stage is loading its model; retry later"))
        assert self.info is not None
        return self.info

    async def GetLoad(
        self, request: server_info_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> server_info_pb2.GetLoadResponse:
        running = min(self._admission.in_flight, self._admission.max_running)
        return server_info_pb2.GetLoadResponse(running=running, queued=self._admission.in_flight - running)


def main(settings: StageSettings, stage: str, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Entry point of a stage's process: structured logs, uvloop, `serve`."""
    logs.configure(settings.log_level, stage)
    tracing.configure(stage)
    uvloop.run(serve())
