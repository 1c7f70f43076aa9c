"""Other people's programs get what they read of the answers. Libraries run in tests/long."""

import base64
import io
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support.clients.programs import (
    DRAWING,
    EDITING,
    HEARING,
    PARAMETERS,
    REQUESTS,
    RESPONSES,
    SOUND,
    SPEECH,
    TRANSLATING,
)
from tests.support.clients.realtime_client import RealtimeClient, session, sound_of
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
SAID = "".join(PIECES)


@pytest.fixture
def gateway(painter: Running) -> Iterator[Running]:
    """Its dit makes images of the sizes that the programs ask for."""
    facts = painter.app.state.gateway.catalog.stage_for("image", None).info.dit
    most, facts.max_pixels = facts.max_pixels, 1024 * 1024
    yield painter
    facts.max_pixels = most


@pytest.mark.parametrize("program", REQUESTS)
async def test_a_program_gets_what_it_reads(gateway: Running, program: str) -> None:
    for path, sent in REQUESTS[program]:
        response = await gateway.http.post(path, **sent)
        assert response.status_code == 200, (path, sent, response.text)
        if path == SPEECH:
            assert (response.headers["content-type"], response.content[:3]) == ("audio/mpeg", b"ID3")
        else:
            assert read(path, response) == SAID


def read(path: str, response: httpx.Response) -> str:
    """The text of an answer; for images, which must be some, the scripted one."""
    if response.headers["content-type"].startswith("text/event-stream"):
        chunks = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    body = response.json()
    if path in (DRAWING, EDITING):
        (picture,) = body["data"]
        Image.open(io.BytesIO(base64.b64decode(picture["b64_json"]))).verify()
        return SAID
    if path == RESPONSES:
        return body["output"][-1]["content"][0]["text"]
    return body["text"] if path in (HEARING, TRANSLATING) else body["choices"][0]["message"]["content"]


async def test_open_webui_sends_a_file_in_chunks_and_reads_voices(gateway: Running) -> None:
    """routers/audio/__init__.py:937, :1559 and :1651: the lists without a key."""
    form = gateway.http.build_request("POST", HEARING, data={"model": ""}, files=SOUND)

    async def chunks() -> AsyncIterator[bytes]:
        body = await form.aread()
        for at in range(0, len(body), 1 << 14):
            yield body[at : at + (1 << 14)]

    headers = {"content-type": form.headers["content-type"]}
    assert (await gateway.http.post(HEARING, content=chunks(), headers=headers)).json()["text"] == SAID
    voices = (await gateway.http.get("/v1/audio/voices")).json()["voices"]
    assert {voice["id"]: voice["name"] for voice in voices}
    assert (await gateway.http.get("/v1/audio/models")).json()["models"][0]["id"]


PCM = {"type": "audio/pcm", "rate": 24000}
DELEGATE = {"type": "function", "name": "generate_chat_completion", "description": "Asks.", "parameters": PARAMETERS}


async def answer(client: RealtimeClient, **response: Any) -> list[dict[str, Any]]:
    events = await client.respond(**response)
    assert events[-1]["response"]["status"] == "completed", events[-1]
    assert sound_of(events)
    return events


async def test_open_webui_speaks_by_a_session(gateway: Running) -> None:
    """routers/audio/__init__.py:484, the engine openai-realtime."""
    quiet = {"tools": [], "tool_choice": "none", "instructions": "Read aloud."}
    audio = {"input": {"turn_detection": None, "transcription": None}, "output": {"format": PCM, "voice": "alloy"}}
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Yes."}]}
    async with session(gateway, "gpt-realtime-2.1-mini") as client:
        patch = {"type": "realtime", "output_modalities": ["audio"], "audio": audio, **quiet}
        await client.ask("session.update", "session.updated", session=patch)
        await answer(client, conversation="none", output_modalities=["audio"], input=[said], **quiet)


async def test_open_webui_calls(gateway: Running) -> None:
    """routers/audio/realtime.py: a session, the chat so far, a turn, and words that belong to no conversation."""
    detection = {"type": "server_vad", "interrupt_response": False, "create_response": False}
    heard = {"format": PCM, "transcription": {"model": "gpt-transcribe"}, "turn_detection": detection}
    patch = {"type": "realtime", "output_modalities": ["audio"], "instructions": "Be brief."}
    patch |= {"audio": {"input": heard, "output": {"format": PCM, "voice": "marin"}}}
    patch |= {"tools": [DELEGATE], "tool_choice": "auto"}
    context = {"id": "chat_context_1", "type": "message", "role": "system"}
    context |= {"content": [{"type": "input_text", "text": "Current chat snapshot: []"}]}
    async with session(gateway, "gpt-realtime-2.1-mini") as client:
        await client.send("session.update", session=patch)
        assert (await client.event())["type"] == "session.updated"
        await client.ask("conversation.item.create", "conversation.item.done", item=context)
        events = await answer(client, metadata={"input_item_id": "item_1"})
        assert events[-1]["response"]["metadata"] == {"input_item_id": "item_1"}
        alone = {"conversation": "none", "input": [], "tools": [], "tool_choice": "none"}
        await answer(client, **alone, instructions="Say this briefly: I am working.", metadata={"status": "working"})
        await client.ask("conversation.item.delete", "conversation.item.deleted", item_id="chat_context_1")
