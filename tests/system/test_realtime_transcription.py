"""What the user says is written down in `/v1/realtime`, by the real thinker."""

import asyncio
import io
import json
import wave
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import connect

from tests.support.clients.realtime_client import RealtimeClient, base64_of
from tests.support.systems.realtime import conversation, heard, send, spoken
from tests.support.systems.stack import HANG_GUARD_S, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.long]
WRITTEN = {"model": "gpt-4o-mini-transcribe", "language": "en"}
SAME = 200  # characters: a random model goes on for thousands, and rounding in another batch changes one of them
ENOUGH_TOKENS = 2 * SAME
EVENTS = "conversation.item.input_audio_transcription"


def transcript_of(stack: Stack, sound: np.ndarray, **form: str) -> dict[str, Any]:
    """How `/v1/audio/transcriptions` begins with the very samples that the model hears."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(heard(sound).tobytes())
    files, asked = (
        {"file": ("said.wav", file.getvalue())},
        {"model": stack.model, "max_completion_tokens": ENOUGH_TOKENS, **form},
    )
    transcript = stack.http.post("/v1/audio/transcriptions", files=files, data=asked).raise_for_status().json()
    assert len(transcript["text"]) >= SAME
    return transcript


async def written(client: RealtimeClient) -> dict[str, Any]:
    """The transcript of the sound that was committed last."""
    events = await client.until(f"{EVENTS}.completed")
    done = events[-1]
    deltas = [event["delta"] for event in events if event["type"] == f"{EVENTS}.delta"]
    assert "".join(deltas) == done["transcript"]
    assert deltas
    return done


async def test_a_conversation_is_written_down_beside_its_answers(stack: Stack):
    (sound,) = spoken("Tell me about the sea, and about the boats on it.")
    expected = transcript_of(stack, sound, language="en")
    settings = {"audio": {"input": {"turn_detection": None, "transcription": WRITTEN}}, "max_output_tokens": 4}
    async with conversation(stack, stack.key, **settings) as client:
        await send(client, sound)
        item = (await client.ask("input_audio_buffer.commit", "conversation.item.done"))["item"]
        done = await written(client)
        assert (done["item_id"], done["content_index"]) == (item["id"], 0)
        assert done["transcript"][:SAME] == expected["text"][:SAME]
        assert done["usage"]["input_tokens"] == expected["usage"]["input_tokens"] > 0
        retrieved = await client.ask("conversation.item.retrieve", "conversation.item.retrieved", item_id=item["id"])
        assert retrieved["item"]["content"][0]["transcript"] == done["transcript"]


async def test_vllms_dialect_writes_down_what_a_file_of_it_has(stack: Stack):
    (sound,) = spoken("Tell me about the sea, and about the boats on it.")
    expected, samples = transcript_of(stack, sound), heard(sound).tobytes()
    url, headers = f"{stack.url.replace('http', 'ws')}/v1/realtime", {"authorization": f"Bearer {stack.key}"}
    async with asyncio.timeout(HANG_GUARD_S), connect(url, additional_headers=headers) as socket:
        await socket.send(json.dumps({"type": "session.update", "model": stack.model}))
        await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
        for begin in range(0, len(samples), 6400):
            audio = base64_of(samples[begin : begin + 6400])
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        await socket.send(json.dumps({"type": "input_audio_buffer.commit", "final": True}))
        text = ""
        while (event := json.loads(await socket.recv()))["type"] != "transcription.done":
            text += event.get("delta", "")
    assert text == event["text"]
    assert text[:SAME] == expected["text"][:SAME]
    assert event["usage"]["prompt_tokens"] == expected["usage"]["input_tokens"]
