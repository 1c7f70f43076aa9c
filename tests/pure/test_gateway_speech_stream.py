"""The WebSocket `/v1/audio/speech/stream`, with scripted stages."""

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.access.api_keys import digest
from services.common.errors import InternalError, QueueFull
from tests.support.scripted.code2wav import PCM16, SAMPLE_RATE_HZ
from tests.support.scripted.talker import VOICES
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/audio/speech/stream"
CONFIG = {"type": "session.config", "model": "scripted", "voice": "ETHAN", "response_format": "pcm"}
DONE = {"type": "input.done"}


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


def text(of: str) -> dict[str, str]:
    return {"type": "input.text", "text": of}


@asynccontextmanager
async def session(gateway: Running, *messages: Any, **options: Any):
    """A connection that has sent `messages`."""
    async with connect(gateway.url.replace("http", "ws") + PATH, open_timeout=60, **options) as socket:
        for message in messages:
            await socket.send(message if isinstance(message, str | bytes) else json.dumps(message))
        yield socket


async def received(socket: ClientConnection) -> tuple[list[dict[str, Any]], bytes]:
    """All events and all audio until the connection is closed."""
    events, audio = [], b""
    async with asyncio.timeout(60):
        try:
            while True:
                message = await socket.recv()
                if isinstance(message, bytes):
                    audio += message
                else:
                    events.append(json.loads(message))
        except ConnectionClosed:
            return events, audio


async def test_text_is_passed_on_as_it_comes_and_audio_comes_before_its_end(gateway):
    talker = gateway.scripts["talker"]
    async with session(gateway, CONFIG | {"seed": 3, "instructions": "Softly."}, text("Good ")) as socket:
        start = json.loads(await socket.recv())
        assert start == {
            "type": "audio.start",
            "format": "pcm",
            "media_type": "audio/pcm",
            "sample_rate_hz": SAMPLE_RATE_HZ,
        }
        audio = await socket.recv()
        assert isinstance(audio, bytes)
        await gateway.until(lambda: talker.typed == ["Good "])
        for message in (text("mor"), text("ning."), DONE):
            await socket.send(json.dumps(message))
        events, rest = await received(socket)
    assert audio + rest == PCM16
    usage = {"input_tokens": 4, "output_tokens": 3, "total_tokens": 7}
    assert events == [{"type": "audio.done", "finish_reason": "stop", "usage": usage}, {"type": "session.done"}]
    assert socket.close_code == 1000
    (asked,) = talker.requests
    assert (asked.text.text, asked.text.instructions, asked.speaker) == ("", "Softly.", VOICES[1])
    assert asked.sampling.seed == 3
    assert talker.typed == ["Good ", "mor", "ning."]


async def test_a_client_that_leaves_ends_the_speech(gateway):
    async with session(gateway, CONFIG, text("Good ")) as socket:
        await socket.recv()
        await gateway.until(lambda: gateway.scripts["talker"].running == 1)
    await gateway.until(lambda: gateway.scripts["talker"].running == 0)
    await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)


BAD = {
    "text first": ([text("Good")], "type"),
    "unknown type": ([{"type": "session.update"}], "type"),
    "no type": ([{}], "type"),
    "no object": (["[]"], None),
    "no JSON": (["{"], None),
    "bytes": ([b"{}"], "type"),
    "another model": ([CONFIG | {"model": "gpt"}], "model"),
    "unknown voice": ([CONFIG | {"voice": "bob"}], "voice"),
    "too fast": ([CONFIG | {"speed": 5}], "speed"),
    "unknown format": ([CONFIG | {"response_format": "ogg"}], "response_format"),
    "unknown member": ([CONFIG | {"split": True}], "split"),
    "whole text": ([CONFIG | {"input": "Good morning"}], "input"),
    "config twice": ([CONFIG, CONFIG], "type"),
    "no text": ([CONFIG, {"type": "input.text"}], "text"),
    "text no text": ([CONFIG, {"type": "input.text", "text": 1}], "text"),
    "half a character": ([CONFIG, '{"type": "input.text", "text": "\\ud83d"}'], None),
    "nothing": ([CONFIG, DONE], "text"),
    "nothing to say": ([CONFIG, text("?!"), text(" ..."), DONE], "text"),
    "too much": ([CONFIG, text("a" * 30_000), text("b" * 30_000)], "text"),
    "more after the end": ([CONFIG, text("Good"), DONE, text("more")], "type"),
}


async def test_names_by_default(gateway):
    """No model, and OpenAI's names."""
    for names in ({}, {"model": "tts-1", "voice": "alloy"}, {"model": "", "voice": None}):
        config = {"type": "session.config", "response_format": "pcm", **names}
        async with session(gateway, config, text("Good "), DONE) as socket:
            events, audio = await received(socket)
        assert (audio, events[-1]) == (PCM16, {"type": "session.done"})


@pytest.mark.parametrize("case", BAD)
async def test_bad_messages_name_the_member(gateway, case):
    messages, param = BAD[case]
    gateway.scripts["code2wav"].hold = True  # no session ends before its last message
    async with session(gateway, *messages) as socket:
        *_, last = (await received(socket))[0]
    assert (last["type"], last["error"]["param"]) == ("error", param), last
    assert socket.close_code == 1008
    await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)


async def test_bad_messages_disturb_nobody(gateway):
    script = gateway.scripts["code2wav"]
    script.hold, script.after = True, 1
    async with session(gateway, CONFIG, text("Good ")) as good:
        await good.recv()
        audio = await good.recv()
        for messages, _ in BAD.values():
            async with session(gateway, *messages) as socket:
                await received(socket)
            assert socket.close_code == 1008
        script.go_on()
        await good.send(json.dumps(DONE))
        events, rest = await received(good)
    assert isinstance(audio, bytes)
    assert audio + rest == PCM16
    assert events[-1] == {"type": "session.done"}


@pytest.mark.parametrize(
    ("error", "kind"), [(QueueFull("full"), "rate_limit_error"), (InternalError("x"), "server_error")]
)
async def test_errors_of_a_stage(gateway, error, kind):
    gateway.scripts["talker"].error = error
    async with session(gateway, CONFIG, text("Good ")) as socket:
        *_, last = (await received(socket))[0]
    assert last["error"]["type"] == kind
    assert socket.close_code == (1013 if kind == "rate_limit_error" else 1011)


async def test_who_says_nothing_does_not_keep_a_place():
    async with running(request_timeout_s=0.5) as gateway, session(gateway) as socket:
        ((event,), _) = await received(socket)
        assert (event["error"]["type"], socket.close_code) == ("timeout_error", 1008)
        await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)


async def test_who_reads_nothing_does_not_keep_a_place(monkeypatch):
    monkeypatch.setattr("gateway.dialects.openai.speech_stream.LAST_WORD_S", 0.0)

    async def never(*_) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("starlette.websockets.WebSocket.send_bytes", never)  # as long as the connection is full
    async with running(request_timeout_s=2.0) as gateway, session(gateway, CONFIG, text("Hi"), DONE) as socket:
        await received(socket)
        await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)


async def test_a_page_of_another_site_is_refused(gateway):
    """Browsers send the origin of the page, and let it connect anywhere."""
    async with session(gateway, origin="http://elsewhere.example") as socket:
        ((event,), _) = await received(socket)
    assert (event["error"]["code"], socket.close_code) == ("foreign_origin", 1008)
    assert "elsewhere.example" in event["error"]["message"]
    async with session(gateway, CONFIG, text("Hi"), DONE, origin=gateway.url) as socket:
        _, audio = await received(socket)
    assert audio == PCM16


async def test_a_key_is_asked_for(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n  - name: alice\n    sha256: {digest('secret')}\n")
    async with running(api_keys_file=file) as gateway:
        with pytest.raises(InvalidStatus) as refused:
            async with session(gateway, CONFIG):
                pass
        assert refused.value.response.status_code == 403
        bearer = {"authorization": "Bearer secret"}
        async with session(gateway, CONFIG, text("Hi"), DONE, additional_headers=bearer) as socket:
            _, audio = await received(socket)
        assert audio == PCM16
