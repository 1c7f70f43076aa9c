"""What the user says is written down in `/v1/realtime`, by the real thinker."""

import io
import wave
from typing import Any

import numpy as np
import pytest

from tests.support.realtime_client import RealtimeClient
from tests.support.realtime_stack import conversation, heard, send, spoken
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.long]
WRITTEN = {"model": "gpt-4o-mini-transcribe", "language": "en"}
SAME = 200  # characters: a random model goes on for thousands, and rounding in another batch changes one of them
EVENTS = "conversation.item.input_audio_transcription"


def transcript_of(stack: Stack, sound: np.ndarray) -> dict[str, Any]:
    """What `/v1/audio/transcriptions` writes of the very samples that the model hears."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(heard(sound).tobytes())
    files, form = {"file": ("said.wav", file.getvalue())}, {"model": stack.model, "language": "en"}
    return stack.http.post("/v1/audio/transcriptions", files=files, data=form).raise_for_status().json()


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
    expected = transcript_of(stack, sound)
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
