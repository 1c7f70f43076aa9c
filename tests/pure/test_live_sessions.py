"""Sessions of the Live API: who has one, what is refused, what ends it, and the sidebands of one; scripted stages."""

import asyncio
import base64
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.access.api_keys import digest
from gateway.dialects.live import connection, readers
from tests.support.clients.live_client import connected, live, tone
from tests.support.clients.realtime_client import base64_of
from tests.support.samples.loudness import Ears
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import SPEECH, Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANSWER = "".join(PIECES)
OUTPUT = {"type": "function_call_output", "call_id": "x", "output": "y"}


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


def _backend(**members: Any) -> dict[str, Any]:
    return {"delegation": {"type": "responses", "responses": {"model": "x", **members}}}


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"model": None}, "session.model"),
        ({"model": "llama"}, "model"),
        ({"model": 5}, "session.model"),
        ({"instructions": "x" * 200_000}, "session.instructions"),
        ({"audio": {"format": {"type": "audio/opus"}}}, "session.audio.format.type"),
        ({"audio": {"format": {"type": "audio/pcm", "rate": 48_000}}}, "session.audio.format"),
        ({"audio": {"format": {"type": "audio/pcmu", "rate": 16_000}}}, "session.audio.format"),
        ({"audio": {"output": {"voice": "nobody"}}}, "session.audio.output.voice"),
        ({"delegation": {"type": "decisions", "decisions": {}}}, "session.delegation"),
        ({"delegation": {"type": "helper"}}, "session.delegation"),
        (_backend(tools=[{"type": "function"}]), "session.delegation.responses.tools[0]"),
        (_backend(tools=[{"type": "function", "name": "a"}] * 2), "session"),
        (_backend(max_output_tokens=0), "session.delegation.responses.max_output_tokens"),
        ({"input": [{"role": "system", "content": []}]}, "session.input[0].role"),
        ({"input": [{"role": "user", "content": "Hi"}]}, "session.input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "text": ""}]}]},
            "session.input[0].content[0]",
        ),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}] * 129}, "session.input"),
        ({"store": True}, "session.store"),
        ({"triggers": [{}]}, "session.triggers"),
    ],
)
async def test_a_session_that_cannot_start_is_refused_by_name(gateway: Running, members: dict, param: str) -> None:
    async with connected(gateway) as client:
        asked = {"model": "gpt-live-1", **members}
        error = await client.refusal(
            "session.start", session={name: value for name, value in asked.items() if value is not None}
        )
        assert (error["param"] or "").startswith(param)
        assert error["message"]
        await client.socket.wait_closed()
        assert client.socket.close_code == 1008
    await gateway.until(lambda: gateway.app.state.gateway.realtime_sessions == 0)


async def test_nothing_comes_before_session_start(gateway: Running) -> None:
    async with connected(gateway) as client:
        error = await client.refusal("session.input_audio.append", audio="")
        assert error["code"] == "session_not_started"
        await client.socket.wait_closed()


@pytest.mark.parametrize(
    ("kind", "members", "code", "param"),
    [
        ("session.start", {"session": {}}, "session_already_started", None),
        ("session.input_audio.append", {"audio": "?"}, "invalid_value", "audio"),
        ("session.input_audio.append", {}, "missing_required_parameter", "audio"),
        ("session.input_audio.append", {"audio": 5}, "invalid_type", "audio"),
        ("session.input_audio.append", {"audio": "", "more": 1}, "unknown_parameter", "more"),
        ("session.output_audio.fixture.play", {"audio": ""}, "invalid_value", "audio"),
        ("session.output_audio.fixture.play", {"audio": "AAAA"}, "invalid_value", "audio"),
        ("session.commentary.append", {"content": ""}, "invalid_value", "content"),
        ("session.thinking.append", {"content": "x" * 9000}, "string_above_max_length", "content"),
        ("session.instructions.append", {"content": "x", "delegation_id": 5}, "invalid_type", "delegation_id"),
        ("response.item.create", {"item": OUTPUT}, "unsupported_parameter", "item"),
        ("response.item.create", {"item": {"type": "tool"}}, "invalid_value", "item.type"),
        ("response.create", {}, "unsupported_parameter", "type"),
        ("session.update", {"session": {"audio": {}}}, "unsupported_parameter", "session.audio"),
        ("session.update", {"session": {"delegation": {"type": "x"}}}, "invalid_value", "session.delegation.type"),
        ("decision.create", {}, "unsupported_parameter", "type"),
        ("transport.dtmf.send", {"event": "1"}, "unsupported_parameter", "type"),
        ("input_audio_buffer.commit", {}, "invalid_value", "type"),
    ],
)
async def test_what_is_refused_ends_nothing(
    gateway: Running, kind: str, members: dict, code: str, param: str | None
) -> None:
    async with live(gateway) as client:
        error = await client.refusal(kind, **members)
        assert (error["code"], error["param"]) == (code, param)
        await client.ask("session.input_audio.mute", "session.input_audio.muted")


async def test_what_is_no_event_ends_nothing(gateway: Running) -> None:
    async with live(gateway) as client:
        for message in ("{", "[]", "{}", b"{}", "[" * 5000):
            await client.socket.send(message)
            assert (await client.event())["type"] == "error"
        await client.ask("session.input_audio.mute", "session.input_audio.muted")


async def test_a_model_without_speech_is_refused() -> None:
    async with running(SPEECH.with_name("text.yaml")) as gateway, connected(gateway) as client:
        error = await client.refusal("session.start", session={"model": "scripted"})
        assert error["code"] == "unsupported_parameter"
        assert "/v1/realtime" in error["message"]


async def test_a_model_without_tools_has_no_tasks_to_hand_over() -> None:
    async with running() as gateway:
        gateway.stages.infos["thinker"].info.thinker.calls_tools = False
        await gateway.publish_info("thinker")
        async with live(gateway) as client:
            await client.ask("session.commentary.append", "session.commentary.appended", content="Greet.")
            await client.answer(ANSWER)
        assert not gateway.scripts["thinker"].requests[0].tools
        async with connected(gateway) as client:
            tools = _backend(tools=[{"type": "function", "name": "lamp"}])
            error = await client.refusal("session.start", session={"model": "gpt-live-1", **tools})
            assert error["param"] == "session.delegation.responses.tools"


async def test_a_session_expires() -> None:
    async with running(realtime_session_s=0.5) as gateway, live(gateway) as client:
        closed = await client.until("session.closed")
        assert closed["reason"] == "expired"
        assert closed["usage"]["seconds"] >= 0.5
        await client.socket.wait_closed()
        assert client.socket.close_code == 1001
        await gateway.until(lambda: gateway.app.state.gateway.realtime_sessions == 0)


async def test_a_gateway_that_stops_says_so_once_an_answer_was_heard() -> None:
    async with AsyncExitStack() as sessions, AsyncExitStack() as exits:
        gateway = await exits.enter_async_context(running())
        client = await sessions.enter_async_context(live(gateway))
        gateway.scripts["code2wav"].frames = 10
        await client.ask("session.commentary.append", "session.commentary.appended", content="Greet.")
        await client.until("session.output_audio.delta")
        stopping = asyncio.create_task(exits.aclose())
        assert (await client.until("error"))["error"]["code"] == "gateway_stopping"
        assert (await client.until("session.closed"))["reason"] == "connection_lost"
        assert client.said("output") == ANSWER
        await client.socket.wait_closed()
        assert client.socket.close_code == 1012
        await stopping


async def test_usage_is_told(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_USAGE_S", 0.05)
    async with live(gateway) as client:
        first, second = [(await client.until("session.usage.updated"))["usage"]["seconds"] for _ in range(2)]
        assert 0 < first < second


async def test_keys_and_sidebands(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_SIDEBANDS", 2)
    monkeypatch.setattr(connection, "MAX_SIDEBANDS", 2)
    file = tmp_path / "keys.yaml"
    names = "".join(f"  - name: {name}\n    sha256: {digest(name)}\n" for name in ("alice", "bob"))
    file.write_text(f"keys:\n{names}")

    def bearer(name: str) -> dict[str, Any]:
        return {"additional_headers": {"authorization": f"Bearer {name}"}}

    async with running(api_keys_file=file) as gateway:
        async with connected(gateway, **bearer("mallory")) as stranger:
            assert (await stranger.until("error"))["error"]["code"] == "invalid_api_key"
            await stranger.socket.wait_closed()
            assert stranger.socket.close_code == 1008
        gateway.app.state.gateway.detectors = Ears()
        async with live(gateway, options=bearer("alice")) as client:
            path = f"/v1/live/sessions/{client.started['id']}/attach"
            for who, where in (("bob", path), ("alice", "/v1/live/sessions/live_x/attach")):
                async with connected(gateway, where, **bearer(who)) as refused:
                    assert (await refused.until("error"))["error"]["code"] == "session_not_found"
            async with (
                connected(gateway, path, **bearer("alice")) as sideband,
                connected(gateway, path, **bearer("alice")) as other,
            ):
                assert (await sideband.until("session.started"))["session"]["id"] == client.started["id"]
                await other.until("session.started")
                async with connected(gateway, path, **bearer("alice")) as third:
                    assert (await third.until("error"))["error"]["code"] == "sideband_limit"
                refused = await sideband.refusal("session.input_audio.append", audio="")
                assert refused["code"] == "unsupported_parameter"
                sound = tone(0.1, 8000)
                await client.send("session.input_audio.append", audio=base64_of(sound))
                heard = await sideband.until("session.input_audio.append")
                assert base64.b64decode(heard["audio"]) == sound
                await sideband.ask("session.commentary.append", "session.commentary.appended", content="Greet.")
                await client.answer(ANSWER)
                told = await sideband.until("session.output_audio.delta")
                assert told["end_ms"] - told["start_ms"] == 100
                await sideband.socket.close()
                await other.until("session.output_transcript.delta")
                await client.ask("session.close", "session.closed")
                assert (await other.until("session.closed"))["reason"] == "close_requested"
                await other.socket.wait_closed()
        assert not gateway.app.state.live_sessions


async def test_a_sideband_changes_nothing_that_the_session_hears(gateway: Running) -> None:
    """At 16 kHz, where a resampler makes what each hears, and with pieces that end within a sample."""
    sound, heard = tone(1.0, 8000, 16_000), list[bytes]()
    for with_sideband in (False, True):
        async with (
            live(gateway, audio={"format": {"type": "audio/pcm", "rate": 16_000}}) as client,
            AsyncExitStack() as on,
        ):
            if with_sideband:
                path = f"/v1/live/sessions/{client.started['id']}/attach"
                await (await on.enter_async_context(connected(gateway, path))).until("session.started")
            for begin in range(0, len(sound), 3201):
                await client.send("session.input_audio.append", audio=base64_of(sound[begin : begin + 3201]))
            await client.ask("session.input_audio.mute", "session.input_audio.muted")
            (handler,) = gateway.app.state.live_sessions.handlers
            heard.append(handler._session.buffer.all())
    assert heard[0] == heard[1]
    assert len(heard[0]) == pytest.approx(len(sound), rel=0.05)
