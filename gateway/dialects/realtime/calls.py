"""Doors to the process that has the calls of WebRTC: `/v1/realtime/calls`, and a session by its `call_id`."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import orjson
from fastapi import APIRouter, Depends, Request
from starlette import status
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from gateway.access.api_keys import key_in
from gateway.access.client_secrets import AZURE_CALLS_PATH, CALLS_PATH, presented_key
from gateway.access.secret_text import PREFIX
from gateway.answers.gateway import Gateway
from gateway.errors import ApiError, invalid
from gateway.http.connection import ClientGone, admitted, counted, key_of, while_connected
from gateway.http.csrf import check_socket
from gateway.http.forms import is_form, read_body, read_form
from gateway.http.json_writer import error_response
from gateway.http.neighbours.node import call_gone
from gateway.http.sockets import counted_session, receive_text, subprotocol_of
from gateway.json_bounds import check_json
from gateway.tasks import cancel
from gateway.validation import Strict

_OWNER = "x-quartet-owner"
_TIMEOUT_S = 30.0
_SDP = "application/sdp"
_MAX_OFFER_BYTES = 64 * 1024  # a browser's has 2 to 8 KiB
_MAX_MESSAGE_BYTES = 128 * 1024 * 1024
_CONTENT = {
    _SDP: {"schema": {"type": "string", "description": "the offer of the client's RTCPeerConnection"}},
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["sdp"],
            "additionalProperties": False,
            "properties": {
                "sdp": {"type": "string", "description": "the offer"},
                "session": {"type": "string", "description": "JSON: members as in session.update, and `model`"},
            },
        }
    },
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    201: {"description": "the answer; Location has the call", "content": {_SDP: {}}}
}

router = APIRouter(tags=["realtime"])


class _CallForm(Strict):
    sdp: str
    session: str = "{}"


_PAGE: dict[str, Any] = {"requestBody": {"content": _CONTENT, "required": True}}


@router.post(CALLS_PATH, status_code=201, responses=_RESPONSES, openapi_extra=_PAGE)
@router.post(AZURE_CALLS_PATH, status_code=201, responses=_RESPONSES, openapi_extra=_PAGE)
async def make_call(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Answers a browser's offer: a realtime session whose sound goes by WebRTC."""
    form = await _read(http)
    session = _session(form.session)
    url = call_process(gateway)
    model = http.query_params.get("model") or session.pop("model", None)
    query = {"model": model} if isinstance(model, str) else {}
    made = await new_call(http, gateway, url, sdp=form.sdp, query=query, session=session)
    return Response(made["sdp"], 201, {"location": f"{http.url.path}/{made['id']}"}, _SDP)


@router.post(f"{CALLS_PATH}/{{call_id}}/hangup")
@router.post(f"{AZURE_CALLS_PATH}/{{call_id}}/hangup")
async def hang_up(http: Request, call_id: str) -> Response:
    """Ends a call."""
    counted(http)
    url = call_process(http.app.state.gateway)
    await ask_call_process("DELETE", f"{url}/calls/{_safe(call_id)}", headers={_OWNER: caller(http)})
    return Response()


async def new_call(http: Request, gateway: Gateway, url: str, **asked: Any) -> dict[str, Any]:
    """The process's answer: id, sdp and session. Raises ApiError; ClientGone.

    Args:
        url: of the process of calls.
        asked: further members of its request.
    """
    body = {"key": key_in(http.headers), "owner": caller(http), **asked}
    if gateway.node:  # a process of an older release does not know it
        body["node"] = gateway.node
    json_type = {"content-type": "application/json"}
    asking = ask_call_process("POST", f"{url}/calls", content=orjson.dumps(body), headers=json_type)
    made = (await while_connected(http.receive, asking)).json()
    http.state.log["call"] = made["id"]
    return made


async def control(socket: WebSocket) -> None:
    """Serves a second controller of a call's session: its events both ways, but for the sound."""
    gateway: Gateway = socket.app.state.gateway
    try:
        if key_of(socket) is None:  # pages of other sites cannot send a key
            check_socket(socket)
        if presented_key(socket).startswith(PREFIX):
            message = "a client secret opens no call that runs; send the API key from a server of your own"
            raise ApiError(401, message, None, "invalid_api_key")
        with counted_session(gateway, key_of(socket)):
            async with _events(call_process(gateway), socket.query_params["call_id"], caller(socket)) as events:
                await _relay(socket, events)
    except ApiError as error:
        socket.state.log.update(error.log)
        await socket.send_denial_response(error_response(error))


async def _relay(socket: WebSocket, events: ClientConnection) -> None:
    await socket.accept(subprotocol_of(socket))

    async def forward() -> None:
        while True:
            await events.send(await receive_text(socket) or "")

    async def back() -> None:
        async for text in events:
            await socket.send_text(text if isinstance(text, str) else text.decode())

    tasks = [asyncio.create_task(forward()), asyncio.create_task(back())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        await socket.close(status.WS_1000_NORMAL_CLOSURE)
    except WebSocketDisconnect:
        raise ClientGone from None
    except ConnectionClosed:
        await socket.close(status.WS_1000_NORMAL_CLOSURE)
    finally:
        await cancel(*tasks)


@asynccontextmanager
async def _events(url: str, call_id: str, owner: str) -> AsyncIterator[ClientConnection]:
    """Raises ApiError: there is no such call, or it is not reached."""
    address = f"{url.replace('http', 'ws', 1)}/calls/{_safe(call_id)}/events"
    options: dict[str, Any] = {"compression": None, "max_size": _MAX_MESSAGE_BYTES, "proxy": None}
    try:
        socket = await connect(address, additional_headers={_OWNER: owner}, **options)
    except InvalidStatus as error:
        raise _refusal(error.response.status_code, bytes(error.response.body or b"")) from None
    except (OSError, WebSocketException):  # a TimeoutError is an OSError
        raise _unreached() from None
    async with socket:
        yield socket


async def _read(http: Request) -> _CallForm:
    """Raises ApiError."""
    if is_form(http):
        form, _ = await read_form(http, _CallForm, set(), 0)
        return form
    kind = http.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != _SDP:
        message = (
            f"the body is {kind[:64] or 'without a type'}; send {_SDP}, or multipart/form-data with sdp and session"
        )
        raise ApiError(400, message, None, "invalid_body")
    body = await read_body(http)
    if len(body) > _MAX_OFFER_BYTES:
        raise invalid("sdp", f"has more than {_MAX_OFFER_BYTES} bytes", "invalid_offer")
    try:
        return _CallForm(sdp=body.decode())
    except UnicodeDecodeError:
        raise invalid("sdp", "is no text in UTF-8", "invalid_offer") from None


def _session(text: str) -> dict[str, Any]:
    """Raises ApiError: 400, no JSON object."""
    check_json(text)
    try:
        session = json.loads(text)
    except (ValueError, RecursionError):
        raise invalid("session", "is not JSON", "invalid_json") from None
    if not isinstance(session, dict):
        raise invalid("session", "must be a JSON object", "invalid_type")
    return session


def caller(http: HTTPConnection) -> str:
    key = key_of(http)
    return "" if key is None else key.entry.sha256


def _safe(call_id: str) -> str:
    """Raises ApiError: 404, no id of a call."""
    if not call_id.isascii() or not call_id.replace("_", "").isalnum():
        raise call_gone(call_id)
    return call_id


def call_process(gateway: Gateway) -> str:
    """Raises ApiError: 501, no process has calls."""
    url = gateway.settings.webrtc
    if url is None:
        message = "this server takes no calls by WebRTC; use the WebSocket /v1/realtime, or start the gateway with "
        raise ApiError(501, f"{message}--webrtc=http://HOST:PORT of `python -m gateway.webrtc`", None, "webrtc_off")
    return url.rstrip("/")


async def ask_call_process(method: str, url: str, **request: Any) -> httpx.Response:
    """Raises ApiError: the process refuses, or is not reached."""
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, verify=False, trust_env=False) as client:  # http alone
            answer = await client.request(method, url, **request)
    except httpx.HTTPError:
        raise _unreached() from None
    if answer.is_success:
        return answer
    raise _refusal(answer.status_code, answer.content)


def _refusal(status_code: int, body: bytes) -> ApiError:
    try:
        error = json.loads(body)["error"]
        retry_s = 5.0 if status_code in (429, 503) else None
        return ApiError(status_code, error["message"], error["param"], error["code"], error["type"], retry_s)
    except (ValueError, LookupError, TypeError):
        return _unreached()


def _unreached() -> ApiError:
    message = "the process that has the calls is not reached; try again later, or use the WebSocket /v1/realtime"
    return ApiError(503, message, None, "calls_unavailable", "service_unavailable_error", 1.0)
