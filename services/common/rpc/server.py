"""A stage's gRPC server: health, reflection, server info, admission."""

from importlib.metadata import version
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quartet.v1 import server_info_pb2, server_info_pb2_grpc
from services.common.rpc import channels
from services.common.rpc.call import Admission
from services.common.rpc.digest import checkpoint_digest, config_digest
from services.common.rpc.errors import Unavailable
from services.common.rpc.settings import StageSettings
from services.common.rpc.status import abort
from services.common.rpc.tls import Credentials
from services.common.telemetry.operations import serve_operations

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

log = structlog.get_logger()


class StageServer:
    """The server around one stage's servicer.

    Health: "" (liveness) is SERVING as soon as the port is open; `service` (readiness) is SERVING from `serve` until
    `stop_serving`.

    Args:
        settings: the stage's settings.
        stage: its kind, e.g. "talker".
        service: full name of the stage's own service, e.g. "quartet.v1.TalkerService".
        credentials: who the stage is to its clients; None: it listens in the clear.

    Attributes:
        grpc: takes the servicers.
        admission: closed until `serve`.
        port: that it listens on; 0 before `listen`.
    """

    def __init__(self, settings: StageSettings, stage: str, service: str, credentials: Credentials | None) -> None:
        self.grpc = grpc.aio.server(options=channels.SERVER_OPTIONS)
        self.admission = Admission(settings.max_running_requests, settings.max_queued_requests, stage)
        self.port = 0
        self._settings, self._stage, self._service, self._credentials = settings, stage, service, credentials
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._info = _ServerInfoServicer(self.admission)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        server_info_pb2_grpc.add_ServerInfoServiceServicer_to_server(self._info, self.grpc)
        self._services = [service, "quartet.v1.ServerInfoService", health.SERVICE_NAME, reflection.SERVICE_NAME]

    def list_service(self, name: str) -> None:
        """Has reflection list a further service, before `listen`."""
        self._services.append(name)

    def describe(self, dtype: str, device: str, **facts: Any) -> server_info_pb2.GetServerInfoResponse:
        """The stage's ServerInfo: what all stages have, and `facts`, the fields of its own."""
        settings = self._settings
        info = server_info_pb2.GetServerInfoResponse(
            stage=self._stage,
            model=settings.model_name,
            version=version("quartet"),
            dtype=dtype.removeprefix("torch."),
            device=device,
            max_running_requests=settings.max_running_requests,
            max_queued_requests=settings.max_queued_requests,
            checkpoint_digest=checkpoint_digest(settings.model),
            **facts,
        )
        info.config_digest = config_digest(info, settings)
        return info

    async def listen(self) -> None:
        """Opens the port: the process lives, and refuses requests.

        Raises:
            RuntimeError: the port is taken.
        """
        settings = self._settings
        address = f"{settings.host}:{settings.port}"
        if self._credentials is None:
            self.port = self.grpc.add_insecure_port(address)
        else:
            self.port = self.grpc.add_secure_port(address, self._credentials.for_server())
        reflection.enable_server_reflection(self._services, self.grpc)
        await self._health.set("", SERVING)
        await self._health.set(self._service, NOT_SERVING)
        await self.grpc.start()
        if settings.metrics_port is not None:
            serve_operations(settings.host, settings.metrics_port, self._state)
        log.info("listening", address=f"{settings.host}:{self.port}", **settings.loggable())

    async def serve(self, info: server_info_pb2.GetServerInfoResponse) -> None:
        """Takes requests from now on."""
        self._info.info = info
        self.admission.open()
        await self._health.set(self._service, SERVING)
        log.info("serving", model=self._settings.model_name, device=info.device)

    async def stop_serving(self) -> None:
        """Is not ready any more; returns when the last request has ended."""
        await self._health.set(self._service, NOT_SERVING)
        log.info("draining", in_flight=self.admission.in_flight)
        await self.admission.drain()

    async def close(self) -> None:
        """Closes the port, and ends what is still under way."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace=0.5)

    async def _state(self, path: str) -> str:
        """gRPC's health as HTTP has it: of the process at "/health", of the stage's service at "/ready"."""
        request = health_pb2.HealthCheckRequest(service=self._service if path == "/ready" else "")
        answer = await self._health.Check(request, None)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


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
        return server_info_pb2.GetLoadResponse(running=self._admission.running, queued=self._admission.queued)
