"""Live sessions by WebRTC: `POST /v1/live/sessions`, which the process of calls answers; and the end of a session."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from gateway.access.client_secrets import LIVE_PATHS
from gateway.answers.gateway import Gateway
from gateway.dialects.realtime.calls import call_process, new_call
from gateway.http.connection import admitted, counted
from gateway.http.forms import page, read_json
from gateway.http.json_writer import Json
from gateway.validation import Strict

router = APIRouter(tags=["realtime"])


class LiveTransport(Strict):
    """How sound and events go."""

    type: Literal["webrtc"]
    sdp: str = Field(description="the offer of the client's RTCPeerConnection")


class LiveCall(Strict):
    """A session by WebRTC. Its events go by the data channel `oai-events`, `session.started` first."""

    session: dict[str, Any] = Field(description="members as in session.start")
    transport: LiveTransport


@router.post(LIVE_PATHS[0], openapi_extra=page(LiveCall, "the session's id, and the answer to the offer"))
async def start_live_call(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Json:
    """Answers a browser's offer: a Live session whose sound goes by WebRTC."""
    request = await read_json(http, LiveCall)
    url, asked = call_process(gateway), {"query": {}, "session": request.session, "is_live": True}
    made = await new_call(http, gateway, url, sdp=request.transport.sdp, **asked)
    return Json({"session": {"id": made["session"]}, "transport": {"type": "webrtc", "sdp": made["sdp"]}})


@router.post(f"{LIVE_PATHS[0]}/{{session_id}}/hangup")
async def hang_up_live(http: Request, session_id: str) -> Response:
    """Ends a Live session, of any transport."""
    counted(http)
    http.app.state.live_sessions.find(session_id, http).hang_up()
    return Response()
