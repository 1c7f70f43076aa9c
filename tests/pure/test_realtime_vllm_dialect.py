"""vLLM's dialect of `/v1/realtime`, with scripted stages."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import connect

from gateway.listening.silero import RATE_HZ
from gateway.media.encode import encode_audio
from services.common.errors import QueueFull
from tests.support.clients.realtime_client import base64_of, session
from tests.support.samples.espeak import recording
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
SAID = "".join(PIECES)
PIECE_BYTES = 6400  # as guidellm sends it


@pytest.fixture(scope="module")
def sentences() -> bytes:
    """Two sentences with a pause after each, PCM16."""
    return 2 * recording(2.0, [1.0]).pcm16_at(RATE_HZ)


class Client:
    """One connection."""

    def __init__(self, socket) -> None:
        self._socket = socket

    async def send(self, kind: str, **members: Any) -> None:
        await self._socket.send(json.dumps({"type": kind, **members}))

    async def append(self, sound: bytes) -> None:
        for begin in range(0, len(sound), PIECE_BYTES):
            await self.send("input_audio_buffer.append", audio=base64_of(sound[begin : begin + PIECE_BYTES]))

    async def commit(self, final: bool) -> None:
        await self.send("input_audio_buffer.commit", final=final)

    async def event(self) -> dict[str, Any]:
        async with asyncio.timeout(60):
            return json.loads(await self._socket.recv())

    async def transcript(self) -> tuple[list[str], dict[str, Any]]:
        """The deltas, and transcription.done."""
        deltas = []
        while (event := await self.event())["type"] == "transcription.delta":
            deltas.append(event["delta"])
        assert event["type"] == "transcription.done", event
        return deltas, event


@asynccontextmanager
async def opened(gateway: Running, model: str = "scripted") -> AsyncIterator[Client]:
    async with connect(f"{gateway.url.replace('http', 'ws')}/v1/realtime", compression=None) as socket:
        client = Client(socket)
        assert (await client.event())["type"] == "session.created"
        await client.send("session.update", model=model)
        yield client


async def test_a_file_is_written_down(speech_gateway: Running, sentences: bytes) -> None:
    async with opened(speech_gateway) as client:
        for _ in range(2):  # a session has as many as its client likes
            await client.append(sentences)
            await client.commit(final=False)
            await client.commit(final=True)
            deltas, done = await client.transcript()
            assert "".join(deltas) == done["text"] == f"{SAID} {SAID}"
            assert done["usage"]["total_tokens"] == done["usage"]["prompt_tokens"] + done["usage"]["completion_tokens"]
    file = {"file": ("said.wav", encode_audio(sentences, RATE_HZ, "wav"))}
    answer = await speech_gateway.http.post("/v1/audio/transcriptions", files=file, data={"model": "scripted"})
    assert answer.json()["text"] == f"{SAID} {SAID}"
    heard = [request.messages[0].content[0].media.data for request in speech_gateway.scripts["thinker"].requests]
    assert len(heard) == 6
    assert sorted(heard[:2]) == sorted(heard[2:4]) == sorted(heard[4:])  # the same windows, however they come


async def test_it_is_written_down_while_it_is_sent(speech_gateway: Running, sentences: bytes) -> None:
    async with opened(speech_gateway) as client:
        await client.commit(final=False)
        half = sentences[: len(sentences) // 2]
        await client.append(half)
        assert (await client.event())["type"] == "transcription.delta"  # before the rest is there
        await client.append(sentences[len(half) :])
        await client.commit(final=False)  # of the same: nothing happens
        await client.commit(final=True)
        _, done = await client.transcript()
        assert done["text"] == f"{SAID} {SAID}"


async def test_silence_and_nothing_have_no_text(speech_gateway: Running) -> None:
    async with opened(speech_gateway) as client:
        for sound in (bytes(2 * RATE_HZ), b""):
            await client.append(sound)
            await client.commit(final=True)
            assert await client.transcript() == ([], {"type": "transcription.done", "text": ""} | _no_usage())
    assert not speech_gateway.scripts["thinker"].requests


def _no_usage() -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}


async def test_what_is_wrong_is_told_as_a_text_and_the_session_goes_on(speech_gateway, sentences, monkeypatch):
    thinker = speech_gateway.scripts["thinker"]
    async with opened(speech_gateway, "llama") as client:
        assert (await client.event())["code"] == "model_not_found"
        await client.commit(final=True)  # of no model
        assert (await client.event())["code"] == "model_not_found"
        await client.send("session.update", model="scripted")
        for kind, members, code in (
            ("input_audio_buffer.append", {"audio": "?"}, "invalid_value"),
            ("input_audio_buffer.append", {}, "missing_required_parameter"),
            ("response.create", {}, "unknown_event"),
            ("session.update", {"session": {}}, "unknown_event"),
            ("session.update", {"model": 1}, "invalid_type"),
        ):
            await client.send(kind, **members)
            event = await client.event()
            assert (event["type"], event["code"]) == ("error", code)
            assert isinstance(event["error"], str)
        monkeypatch.setattr("gateway.dialects.realtime.vllm_dialect._MOST_WAITING_S", 0.1)
        await client.append(bytes(2 * PIECE_BYTES))
        assert (await client.event())["code"] == "input_audio_buffer_full"
        monkeypatch.undo()
        thinker.error = QueueFull("is full", 1.0)
        await client.append(sentences)
        await client.commit(final=True)
        assert (await client.event())["code"] == "queue_full"
        thinker.error = None
        await client.append(sentences)
        await client.commit(final=True)
        assert (await client.transcript())[1]["text"] == f"{SAID} {SAID}"


async def test_one_is_written_down_at_a_time_and_ends_with_its_client(speech_gateway, sentences) -> None:
    thinker = speech_gateway.scripts["thinker"]
    async with opened(speech_gateway) as client:
        thinker.hold = True
        await client.append(sentences)
        await client.commit(final=True)
        await speech_gateway.until(lambda: thinker.running == 2)
        await client.append(sentences)
        await client.commit(final=True)
        while (event := await client.event())["type"] == "transcription.delta":
            pass
        assert event["code"] == "transcription_in_progress"
    await speech_gateway.until(lambda: thinker.running == 0)
    assert thinker.ended[-1] == "cancelled"
    await speech_gateway.until(lambda: speech_gateway.app.state.gateway.realtime_sessions == 0)


async def test_a_conversation_stays_one(speech_gateway: Running) -> None:
    async with session(speech_gateway) as client:
        await client.say("Hi")
        assert (await client.refusal("session.update", model="scripted"))["param"] == "session"
        assert (await client.respond(output_modalities=["text"]))[-1]["response"]["status"] == "completed"
