"""The Live API by WebRTC: `POST /v1/live/sessions`, with scripted stages."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from openai.types.live import LiveCreateResponse
from prometheus_client import REGISTRY

from tests.support.clients.caller import Caller
from tests.support.clients.live_client import connected
from tests.support.samples.espeak import spoken
from tests.support.scripted import code2wav
from tests.support.scripted.thinker import PIECES
from tests.support.systems.calls import CallServer, call_server
from tests.support.systems.gateway import running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/live/sessions"
SESSION = {"model": "gpt-live-1", "instructions": "Be kind."}
ANSWER = "".join(PIECES)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[CallServer]:
    async with call_server() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def server(shared: CallServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CallServer]:
    samples = 8000 * np.sin(np.arange(code2wav.SAMPLE_RATE_HZ) / 8)  # that Opus keeps
    monkeypatch.setattr(code2wav, "sound", lambda _: samples.astype("<i2").tobytes())
    yield shared
    await shared.all_gone()
    await shared.gateway.reset()


async def dial(server: CallServer, caller: Caller, **session: Any) -> LiveCreateResponse:
    """The gateway's answer. The call has begun, and `session.started` has come."""
    body = {"session": SESSION | session, "transport": {"type": "webrtc", "sdp": await caller.offer()}}
    answer = await server.gateway.http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    made = LiveCreateResponse.model_validate(answer.json())
    await caller.begin(made.transport.sdp)
    assert (await caller.until("session.started"))["session"]["id"] == made.session.id
    return made


async def test_a_spoken_turn_and_a_hang_up(server: CallServer) -> None:
    name, caller = "quartet_gateway_first_sound_seconds_count", Caller()
    answered = REGISTRY.get_sample_value(name, {"transport": "webrtc"}) or 0.0
    try:
        made = await dial(server, caller)
        caller.microphone.say(np.frombuffer(spoken("Tell me about the boats.", 48_000), "<i2"))
        said = ""
        while said != ANSWER:
            said += (await caller.until("session.output_transcript.delta"))["delta"]
        kinds = [event["type"] for event in caller.events]
        heard = server.gateway.scripts["thinker"].requests[0].messages[-1].content[0].media
        assert len(heard.data) > 16_000  # half a second
        assert "session.output_audio.delta" not in kinds
        assert max(caller.heard) > 1000
        assert REGISTRY.get_sample_value(name, {"transport": "webrtc"}) == answered + 1
        caller.send("session.input_audio.append", audio="AAAA")  # there is a microphone
        caller.send("session.start", session=SESSION)
        assert (await caller.until("error"))["error"]["code"] == "session_already_started"
        async with connected(server.gateway, f"{PATH}/{made.session.id}/attach") as sideband:
            await sideband.until("session.started")
            assert (await server.gateway.http.post(f"{PATH}/{made.session.id}/hangup")).status_code == 200
            assert (await sideband.until("session.closed"))["reason"] == "remote_hangup"
        assert (await caller.until("session.closed"))["reason"] == "remote_hangup"
    finally:
        await caller.close()


async def test_other_formats_of_sound_are_the_connections(server: CallServer) -> None:
    caller = Caller()
    try:
        await dial(server, caller, audio={"format": {"type": "audio/pcmu"}, "output": {"voice": "cedar"}})
        started = next(event for event in caller.events if event["type"] == "session.started")
        assert started["session"]["audio"]["format"] == {"type": "audio/pcm", "rate": 24_000}
        assert started["session"]["audio"]["output"]["voice"] == "cedar"
    finally:
        await caller.close()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"session": None}, "session"),
        ({"transport": {"type": "webrtc"}}, "transport.sdp"),
        ({"transport": {"type": "websocket", "sdp": "x"}}, "transport.type"),
        ({"transport": {"type": "webrtc", "sdp": "v=0"}}, "sdp"),
        ({"session": {"model": "llama"}}, "model"),
        ({"session": {}}, "session.model"),
        ({"session": SESSION | {"store": True}}, "session.store"),
        ({"session": SESSION | {"audio": {"output": {"voice": "nobody"}}}}, "session.audio.output.voice"),
    ],
)
async def test_what_cannot_begin_is_refused_by_name(server: CallServer, change: dict[str, Any], param: str) -> None:
    caller = Caller()
    try:
        body = {"session": SESSION, "transport": {"type": "webrtc", "sdp": await caller.offer()}} | change
        answer = await server.gateway.http.post(PATH, json=body)
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["param"] == param
    finally:
        await caller.close()


async def test_a_session_that_is_not_open_is_not_hung_up(server: CallServer) -> None:
    answer = await server.gateway.http.post(f"{PATH}/live_x/hangup")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")


async def test_without_a_process_of_calls() -> None:
    async with running() as gateway:
        body = {"session": SESSION, "transport": {"type": "webrtc", "sdp": "v=0"}}
        answer = await gateway.http.post(PATH, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "webrtc_off")
