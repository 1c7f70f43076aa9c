"""What the gateway asks this process for: calls, their ends, and their events."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, generate_latest
from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.status import WS_1000_NORMAL_CLOSURE
from starlette.websockets import WebSocket, WebSocketDisconnect

from gateway.errors import ApiError
from gateway.http.json_writer import Json, error_response
from gateway.http.neighbours.node import call_gone
from gateway.http.sockets import receive_text
from gateway.tasks import cancel
from gateway.validation import Strict, validated_json
from gateway.webrtc.call import RtcCall, new_call_id
from gateway.webrtc.call_speech import CallSpeech
from gateway.webrtc.live_speech import LiveSpeech
from gateway.webrtc.port import UdpPort, open_port
from gateway.webrtc.sdp import read_offer
from gateway.webrtc.session_socket import open_live, open_session
from gateway.webrtc.settings import WebRtcSettings
from services.common.telemetry.metrics_page import MetricsPage

RUNNING = Gauge("quartet_webrtc_calls", "calls by WebRTC that go on")
ENDED = Counter("quartet_webrtc_ended_calls", "calls by WebRTC that have ended, by how", ["outcome"])
CONCEALED = Counter("quartet_webrtc_concealed_seconds", "sound of clients that the network lost")

OWNER = "x-quartet-owner"  # of a call, by whom the gateway knows its caller; "" without keys
_MAX_CONTROLLER_TEXTS = 4000
_MAX_CONTROLLERS = 8  # of a call
_METRICS_KEPT_S = 1.0

log = structlog.get_logger()


class CallRequest(Strict):
    """A call as the gateway asks for it."""

    sdp: str
    key: str = Field(description="the caller's API key or client secret")
    owner: str
    query: dict[str, str]
    session: dict[str, Any]
    is_live: bool = Field(default=False, description="of the Live API")
    node: str = Field(default="", pattern="^[0-9a-f]*$", description="of the gateway, for the call's id")


class Calls:
    """The calls of this process."""

    def __init__(self, settings: WebRtcSettings, port: UdpPort) -> None:
        self._settings, self.port = settings, port
        self._calls = dict[str, RtcCall]()
        self._tasks = set[asyncio.Task[None]]()
        self._opening = 0

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[RtcCall]:
        return iter(self._calls.values())

    async def open(self, request: CallRequest) -> RtcCall:
        """Raises ApiError."""
        offer = read_offer(request.sdp)
        if len(self._calls) + self._opening >= self._settings.max_calls:
            message = f"there are {self._settings.max_calls} calls, as many as may be; try again later"
            raise ApiError(429, message, None, "call_limit", "rate_limit_error", 5.0)
        self._opening += 1
        try:
            call_id = new_call_id(request.node)
            url = self._settings.gateway
            if request.is_live:
                socket, created = await open_live(url, request.key, request.session, call_id)
            else:
                socket, created = await open_session(url, request.key, request.query, request.session, call_id)
            speech = LiveSpeech if request.is_live else CallSpeech
            call = RtcCall(call_id, request.owner, self.port, offer, socket, created, speech)
        finally:
            self._opening -= 1
        self._calls[call_id] = call
        task = asyncio.create_task(self._run(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return call

    async def _run(self, call: RtcCall) -> None:
        try:
            with RUNNING.track_inprogress():
                await call.run()
        finally:
            del self._calls[call.id]
            ENDED.labels(call.outcome).inc()
            CONCEALED.inc(call.concealed_ms / 1000)

    def of(self, call_id: str, owner: str) -> RtcCall:
        """Raises ApiError: 404, there is none, or it is another's."""
        call = self._calls.get(call_id)
        if call is None or call.owner != owner:
            raise call_gone(call_id)
        return call

    async def close(self) -> None:
        for call in self._calls.values():
            call.hang_up("the process stops")
        if self._tasks:
            await asyncio.wait(self._tasks)
        self.port.close()


def create_app(settings: WebRtcSettings) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        port = await open_port(settings.udp_host, settings.udp_port, settings.announced)
        app.state.calls = Calls(settings, port)
        told = [f"{host}:{number or port.number}" for host, number in settings.announced]
        log.info("listening", udp_port=port.number, told=told, gateway=settings.gateway)
        try:
            yield
        finally:
            await app.state.calls.close()

    routes = [
        Route("/health", _health),
        Route("/metrics", _metrics),
        Route("/calls", _open, methods=["POST"]),
        Route("/calls/{id}", _hang_up, methods=["DELETE"]),
        WebSocketRoute("/calls/{id}/events", _control),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={ApiError: _refuse})
    app.state.metrics = MetricsPage(generate_latest, _METRICS_KEPT_S)
    return app


async def _refuse(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _health(http: Request) -> Json:
    calls: Calls = http.app.state.calls
    port = calls.port
    return Json({"status": "ok", "calls": len(calls), "agents": port.agents, "addresses": port.known_addresses})


async def _metrics(http: Request) -> Response:
    return Response(http.app.state.metrics.read(), media_type=CONTENT_TYPE_LATEST)


async def _open(http: Request) -> Json:
    request = validated_json(CallRequest, await http.body())
    call = await http.app.state.calls.open(request)
    return Json({"id": call.id, "sdp": call.answer, "session": call.session_id}, 201)


async def _hang_up(http: Request) -> Response:
    http.app.state.calls.of(http.path_params["id"], http.headers.get(OWNER, "")).hang_up()
    return Response()


async def _control(socket: WebSocket) -> None:
    """Another controller of a call's session: events both ways."""
    try:
        call = socket.app.state.calls.of(socket.path_params["id"], socket.headers.get(OWNER, ""))
    except ApiError as error:
        await socket.send_denial_response(error_response(error))
        return
    if call.controllers >= _MAX_CONTROLLERS:
        message = f"the call has {_MAX_CONTROLLERS} controllers, as many as may be"
        await socket.send_denial_response(error_response(ApiError(429, message, None, "controller_limit")))
        return
    await socket.accept()
    texts = asyncio.Queue[str](_MAX_CONTROLLER_TEXTS)

    def take(text: str) -> None:
        if texts.full():  # it reads nothing
            call.leave(take)
            texts.get_nowait()
            text = ""
        texts.put_nowait(text)

    async def read() -> None:
        while True:
            call.ask_for(await receive_text(socket) or b"")

    call.join(take)
    reading = asyncio.create_task(read())
    try:
        with suppress(WebSocketDisconnect):
            while text := await texts.get():
                await socket.send_text(text)
            await socket.close(WS_1000_NORMAL_CLOSURE)
    finally:
        call.leave(take)
        await cancel(reading)
