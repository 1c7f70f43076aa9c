"""The start-up that all stages share: load, warm up, describe, bind, serve, drain."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import structlog
import uvloop

from quartet.v1 import server_info_pb2, stream_pb2, stream_pb2_grpc
from services.common.engine.process import freeze_heap
from services.common.rpc import tls
from services.common.rpc.channels import Channels
from services.common.rpc.server import StageServer
from services.common.rpc.settings import StageSettings
from services.common.stream.consumer import ConsumerTransports, StreamConsumer
from services.common.stream.hub import StreamHub
from services.common.stream.service import TensorStreamServicer
from services.common.stream.shared_memory import open_shared_memory
from services.common.stream.ucx import UcxTransport, open_ucx_worker
from services.common.telemetry import logs, tracing

CLEAN_UP_S = 5.0  # longest wait for an abandoned start to remove its files

_Engine = TypeVar("_Engine")
_Settings = TypeVar("_Settings", bound=StageSettings)

log = structlog.get_logger()


class Stage:
    """One stage: its server, the streams it produces and consumes, its engine's life. Made in a running event loop.

    Several can live in one process: each has its own identity, channels and transports.

    Args:
        settings: of the stage.
        name: its kind, e.g. "talker".
        service: full name of its own service, e.g. "quartet.v1.TalkerService".
        streams: whether it produces streams for others.

    Attributes:
        grpc: server that takes the stage's servicer.
        admission: of its requests.
        hub: streams it produces.
        consumer: reads streams of others.
        resources: closed last, after everything has ended.

    Raises:
        SystemExit: the files of its TLS settings cannot be used.
    """

    def __init__(self, settings: StageSettings, name: str, service: str, streams: bool = True) -> None:
        credentials = tls.load(settings)
        self.server = StageServer(settings, name, service, credentials)
        self.grpc, self.admission = self.server.grpc, self.server.admission
        self.hub = StreamHub()
        self.resources = AsyncExitStack()
        ucx = open_ucx_worker(settings)
        self.hub.transports += [UcxTransport(ucx, settings.ucx_min_bytes)] if ucx else []
        reads = ConsumerTransports.of(settings.transports, Path(settings.shared_memory_dir), ucx)
        self.consumer = StreamConsumer(Channels(credentials), reads)
        self._settings, self._name = settings, name
        self._loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[None] = self._loop.create_future()
        if streams:
            stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(self.hub, name), self.grpc)
            self.server.list_service(stream_pb2.DESCRIPTOR.services_by_name["TensorStreamService"].full_name)

    def request_stop(self) -> None:
        """Begins to drain; while the engine is loading, gives up."""
        if not self._stop.done():
            self._stop.set_result(None)

    def fatal(self, error: BaseException) -> None:
        """The engine is beyond repair: `serve` ends with `error`, so that a supervisor starts another process. May be
        called in any thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self._stop.done():
            self._stop.set_exception(error)

    async def serve(
        self,
        load: Callable[[], Awaitable[_Engine]],
        warm_up: Callable[[_Engine], Awaitable[None]],
        describe: Callable[[_Engine], server_info_pb2.GetServerInfoResponse],
        bind: Callable[[_Engine, server_info_pb2.GetServerInfoResponse], None],
    ) -> None:
        """Serves until `request_stop`, then drains: refuses new work, finishes what is in flight, stops.

        The port is open while the stage loads.

        Args:
            load: makes the engine.
            warm_up: runs a small request on it.
            describe: makes the server info, see `StageServer.describe`.
            bind: gives the engine to the stage's servicer; requests come after that.

        Raises:
            RuntimeError: the port is taken.
            Exception: whatever one of the functions raised, or `fatal` was given.
        """

        async def start() -> server_info_pb2.GetServerInfoResponse:
            engine = await load()
            await warm_up(engine)
            info = describe(engine)
            bind(engine, info)
            return info

        await self.server.listen()
        # In a thread, because the kernel clears all of it.
        if shared_memory := await asyncio.to_thread(open_shared_memory, self._settings, self._name):
            self.hub.transports.insert(0, shared_memory)
        starting = asyncio.ensure_future(start())
        async with self.resources:
            try:
                await asyncio.wait({starting, self._stop}, return_when=asyncio.FIRST_COMPLETED)
                if self._stop.done():
                    await self._abandon(starting)
                info = starting.result()
                freeze_heap()
                await self.server.serve(info)
                await self._stop
                await self._drain()
            finally:
                starting.cancel()
                await self.server.close()
                await self.consumer.channels.close_all()
                self._close_transports()
        log.info("stopped")

    async def _abandon(self, starting: "asyncio.Future[Any]") -> None:
        """Ends the process: loading goes on in a thread, which nothing can stop and the interpreter would wait for."""
        log.info("stopped while loading")
        starting.cancel()
        await asyncio.wait({starting}, timeout=CLEAN_UP_S)
        await self.grpc.stop(grace=0)
        self._close_transports()
        os._exit(1 if self._stop.exception() else 0)

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self.server.stop_serving()
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

    Args:
        settings: of the stage.
        name, service, streams: see `Stage`.
        serve: calls `Stage.serve`.
    """

    async def run() -> None:
        stage = Stage(settings, name, service, streams)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stage.request_stop)
        await serve(stage, settings)

    logs.configure(settings.log_level, name)
    tracing.configure(name)
    uvloop.run(run())
