"""Answers in `/v1/realtime`, and what the stages are asked for them, with scripted stages."""

import io
import math
from collections.abc import Iterable

import numpy as np
import pytest
import soundfile
from PIL import Image

from quartet.v1 import thinker_pb2
from services.common.errors import ContextTooLong, InternalError, QueueFull, StageError, TooManyMedia
from tests.support.clients.realtime_client import TONE, base64_of, kinds, session, sound_of
from tests.support.scripted.code2wav import PCM16, SAMPLE_RATE_HZ
from tests.support.scripted.script import Script
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANSWER = "".join(PIECES)
ANSWER_IDS = list(range(len(PIECES)))


def read(messages: Iterable[thinker_pb2.ChatMessage]) -> list[str | list[int]]:
    """What a thinker reads of each message: its ids, or else its text."""
    return [list(message.token_ids) or message.content[0].text for message in messages]


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


async def test_a_spoken_answer_in_the_order_of_openais_dialect(gateway):
    async with session(gateway) as client:
        said = await client.say("Hi")
        events = await client.respond(instructions="Be kind.", metadata={"client_event_id": "x"})
    assert kinds(events)[:4] == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
    ]
    assert kinds(events)[-7:] == [
        "response.output_audio.delta",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    created, done = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["metadata"]) == ("in_progress", {"client_event_id": "x"})
    assert (done["status"], done["status_details"]) == ("completed", {"type": "completed"})
    (item,) = done["output"]
    assert item["content"] == [{"type": "output_audio", "transcript": ANSWER}]
    added = next(event for event in events if event["type"] == "conversation.item.added")
    assert added["previous_item_id"] == said["item"]["id"]
    seconds = len(sound_of(events)) / 2 / 24_000
    assert seconds == pytest.approx(len(PCM16) / 2 / SAMPLE_RATE_HZ, abs=0.002)
    assert done["usage"] == {
        "input_tokens": 10,
        "input_token_details": {"text_tokens": 3, "audio_tokens": 3, "image_tokens": 4, "cached_tokens": 2},
        "output_tokens": 6,
        "output_token_details": {"text_tokens": 3, "audio_tokens": 3},
        "total_tokens": 16,
    }
    (asked,) = gateway.scripts["thinker"].requests
    told = [(message.role, message.content[0].text) for message in asked.messages]
    assert told == [("system", "Be kind."), ("user", "Hi")]


async def test_a_written_answer_and_the_turn_after_it(gateway):
    async with session(gateway) as client:
        await client.ask("session.update", "session.updated", session={"output_modalities": ["text"]})
        await client.say("Hi")
        events = await client.respond()
        await client.say("And?")
        await client.respond(max_output_tokens=5)
    assert kinds(events) == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    assert not gateway.scripts["talker"].requests
    _, second = gateway.scripts["thinker"].requests
    assert [message.role for message in second.messages] == ["user", "assistant", "user"]
    assert read(second.messages) == ["Hi", ANSWER_IDS, "And?"]
    assert second.sampling.max_tokens == 5


async def test_a_turn_of_sound(gateway):
    async with session(gateway) as client:
        for begin in range(0, len(TONE), 4801):  # odd: samples are cut in two
            await client.send("input_audio_buffer.append", audio=base64_of(TONE[begin : begin + 4801]))
        await client.send("input_audio_buffer.commit")
        committed, added, _ = await client.until("conversation.item.done")
        assert committed["item_id"] == added["item"]["id"]
        assert added["item"]["content"][0]["type"] == "input_audio"
        await client.respond()
    (asked,) = gateway.scripts["thinker"].requests
    samples, rate_hz = soundfile.read(io.BytesIO(asked.messages[0].content[0].media.data))
    assert rate_hz == 16_000
    assert len(samples) == pytest.approx(16_000, abs=1000)
    spectrum = np.abs(np.fft.rfft(samples))
    assert np.argmax(spectrum) * rate_hz / len(samples) == pytest.approx(440, abs=2)


async def test_sound_in_an_item(gateway):
    async with session(gateway) as client:
        content = [{"type": "input_audio", "audio": base64_of(TONE)}, {"type": "input_text", "text": "What is it?"}]
        item = {"type": "message", "role": "user", "content": content}
        done = await client.ask("conversation.item.create", "conversation.item.done", item=item)
        assert "audio" not in done["item"]["content"][0]
        await client.respond(output_modalities=["text"])
    (asked,) = gateway.scripts["thinker"].requests
    sound, text = asked.messages[0].content
    assert soundfile.info(io.BytesIO(sound.media.data)).duration == pytest.approx(1.0, abs=0.06)
    assert text.text == "What is it?"


async def test_a_call_of_a_function_and_its_output(gateway):
    thinker = gateway.scripts["thinker"]
    thinker.tool_call = True
    tool = {"type": "function", "name": "lamp", "parameters": {"type": "object"}}
    async with session(gateway) as client:
        update = {"tools": [tool], "tool_choice": "required", "output_modalities": ["text"]}
        await client.ask("session.update", "session.updated", session=update)
        await client.say("Light!")
        events = await client.respond()
        assert kinds(events) == [
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        (call,) = events[-1]["response"]["output"]
        wanted = {"name": "lamp", "arguments": '{"on":true}', "status": "completed"}
        assert call | wanted == call
        assert len(call["call_id"]) <= 32  # clients shorten longer ones, and answer those
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "it is on"}
        added = await client.ask("conversation.item.create", "conversation.item.added", item=output)
        assert added["previous_item_id"] == call["id"]
        thinker.tool_call = False
        await client.respond()
    first, second = thinker.requests
    assert (first.tools[0].name, first.tool_choice.mode) == ("lamp", 3)
    _, assistant, told = second.messages
    assert (assistant.role, list(assistant.token_ids)) == ("assistant", ANSWER_IDS)
    assert (told.role, told.tool_call_id, told.content[0].text) == ("tool", call["call_id"], "it is on")


async def test_a_cancelled_answer(gateway):
    code2wav = gateway.scripts["code2wav"]
    code2wav.hold, code2wav.after = True, 1
    async with session(gateway) as client:
        await client.say("Hi")
        await client.send("response.create")
        await client.until("response.output_audio.delta")
        busy = await client.refusal("response.create")
        assert busy["code"] == "conversation_already_has_active_response"
        await client.send("response.cancel")
        done = (await client.until("response.done"))[-1]["response"]
        assert done["status"] == "cancelled"
        assert done["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
        assert done["output"][0]["status"] == "incomplete"
        assert done["usage"]["output_token_details"]["audio_tokens"] == 1
        assert (await client.refusal("response.cancel"))["code"] == "response_cancel_not_active"
        await gateway.until(lambda: code2wav.ended == ["cancelled"])
        code2wav.go_on()
        assert (await client.respond())[-1]["response"]["status"] == "completed"


async def test_what_was_not_sent_of_a_cancelled_answer_was_not_said(gateway):
    code2wav, thinker = gateway.scripts["code2wav"], gateway.scripts["thinker"]
    code2wav.hold, code2wav.after = True, 1  # a third of the sound is sent: 80 ms, and a word at most
    async with session(gateway) as client:
        await client.say("Hi")
        await client.send("response.create")
        await client.until("response.output_audio.delta")
        await gateway.until(lambda: thinker.ended == ["done"])
        events = (
            await client.ask("response.cancel", "response.output_audio_transcript.done"),
            *await client.until("response.done"),
        )
        code2wav.go_on()
        item = events[-1]["response"]["output"][0]
        assert events[0]["transcript"] == item["content"][0]["transcript"] == ""
        await client.say("What?")
        await client.respond(output_modalities=["text"])
    told = [(message.role, message.content[0].text) for message in thinker.requests[-1].messages]
    assert told == [("user", "Hi"), ("user", "What?")]


async def test_a_call_need_not_wait_for_the_sound(gateway):
    thinker, code2wav = gateway.scripts["thinker"], gateway.scripts["code2wav"]
    thinker.tool_call, code2wav.hold, code2wav.after = True, True, 1
    async with session(gateway) as client:
        await client.say("Light!")
        await client.send("response.create", response={"tools": [{"type": "function", "name": "lamp"}]})
        events = await client.until("response.output_item.done")
        assert events[-1]["item"]["status"] == "completed"
        code2wav.go_on()
        done = (await client.until("response.done"))[-1]["response"]
        calls = [item for item in done["output"] if item["type"] == "function_call"]
        assert [call["arguments"] for call in calls] == ['{"on":true}']


async def test_a_truncated_answer_is_what_the_model_remembers(gateway):
    async with session(gateway) as client:
        await client.say("Hi")
        events = await client.respond()
        item = events[-1]["response"]["output"][0]
        whole_ms = math.ceil(len(sound_of(events)) * 1000 / (2 * 24_000))  # some clients round up
        cut = {"item_id": item["id"], "content_index": 0}
        beyond = await client.refusal("conversation.item.truncate", **cut, audio_end_ms=whole_ms + 1)
        assert beyond["param"] == "audio_end_ms"
        for end_ms in (whole_ms, 150):
            await client.ask("conversation.item.truncate", "conversation.item.truncated", **cut, audio_end_ms=end_ms)
        retrieved = await client.ask("conversation.item.retrieve", "conversation.item.retrieved", item_id=item["id"])
        assert retrieved["item"]["content"][0]["transcript"] == "Hello,"
        await client.say("Yes?")
        await client.respond(output_modalities=["text"])
    assert gateway.scripts["thinker"].requests[-1].messages[1].content[0].text == "Hello,"


async def test_out_of_band_answers(gateway):
    async with session(gateway) as client:
        said = await client.say("Hi")
        wanted = {"conversation": "none", "output_modalities": ["text"], "metadata": {"topic": "t"}}
        reference = {"type": "item_reference", "id": said["item"]["id"]}
        asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Classify."}]}
        events = await client.respond(**wanted, input=[reference, asked])
        assert "conversation.item.added" not in kinds(events)
        done = events[-1]["response"]
        assert (done["conversation_id"], done["metadata"]) == (None, {"topic": "t"})
        await client.respond(**wanted, input=[], instructions="Say hi.")
        gone = await client.refusal("conversation.item.retrieve", item_id=done["output"][0]["id"])
        assert gone["code"] == "item_retrieve_invalid_item_id"
    first, second = gateway.scripts["thinker"].requests
    assert [message.content[0].text for message in first.messages] == ["Hi", "Classify."]
    assert [message.content[0].text for message in second.messages] == ["Say hi."]


@pytest.mark.parametrize(
    ("error", "kind"), [(QueueFull("full"), "rate_limit_error"), (InternalError("x"), "server_error")]
)
async def test_a_stage_that_fails_fails_the_response(gateway, error, kind):
    thinker = gateway.scripts["thinker"]
    thinker.error, thinker.after = error, 2
    async with session(gateway) as client:
        await client.say("Hi")
        done = (await client.respond())[-1]["response"]
        assert (done["status"], done["status_details"]["error"]["type"]) == ("failed", kind)
        thinker.error = None
        assert (await client.respond())[-1]["response"]["status"] == "completed"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextTooLong("messages", "too long"), "context_length_exceeded"),
        (TooManyMedia("messages[0].content[0]", "is one audio too many"), "invalid_value"),
    ],
    ids=["tokens", "media"],
)
async def test_a_conversation_that_is_too_long_loses_its_beginning(gateway, error: StageError, code: str):
    thinker = gateway.scripts["thinker"]
    async with session(gateway) as client:
        for text in ("one", "two", "three", "four"):
            await client.say(text)
        thinker.error = error
        assert (await client.respond())[-1]["response"]["status_details"]["error"]["code"] == code
        assert lengths(thinker) == [4, 3, 2, 1]

        def two_are_enough() -> float:
            if lengths(thinker)[-1] == 2:
                thinker.error = None
            return 0.0

        thinker.takes_s = two_are_enough
        assert (await client.respond(output_modalities=["text"]))[-1]["response"]["status"] == "completed"
        await client.respond(output_modalities=["text"])
        assert lengths(thinker)[4:] == [4, 3, 2, 3]
        assert read(thinker.requests[-1].messages) == ["three", "four", ANSWER_IDS]
        await client.ask("session.update", "session.updated", session={"truncation": "disabled"})
        thinker.error = error
        assert (await client.respond())[-1]["response"]["status"] == "failed"
        assert lengths(thinker)[8:] == [4]


async def test_a_session_may_say_how_much_is_retained(gateway):
    thinker = gateway.scripts["thinker"]
    truncation = {"type": "retention_ratio", "retention_ratio": 0.5, "token_limits": {"post_instructions": 9}}
    async with session(gateway) as client:
        update = {"truncation": truncation, "output_modalities": ["text"]}
        await client.ask("session.update", "session.updated", session=update)
        for text in ("one", "two", "three", "four"):
            await client.say(text)
        await client.respond()  # the scripted prompt has 10 tokens
        await client.respond()
        update["truncation"]["token_limits"]["post_instructions"] = 10
        await client.ask("session.update", "session.updated", session=update)
        await client.respond()
        await client.respond()
    assert lengths(thinker) == [4, 3, 2, 3]


def lengths(thinker: Script) -> list[int]:
    """Messages of each request."""
    return [len(request.messages) for request in thinker.requests]


async def test_an_answer_that_reaches_its_limit_is_incomplete(gateway):
    gateway.scripts["thinker"].too_long = True
    async with session(gateway) as client:
        await client.say("Hi")
        events = await client.respond()
        done = events[-1]["response"]
    assert done["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
    assert done["output"][0]["status"] == "incomplete"
    seconds = len(sound_of(events)) / 2 / 24_000  # what was written is spoken to its end
    assert seconds == pytest.approx(len(PCM16) / 2 / SAMPLE_RATE_HZ, abs=0.002)


async def test_a_picture(gateway):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    url = "data:image/png;base64," + base64_of(file.getvalue())
    async with session(gateway) as client:
        item = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": url}]}
        done = await client.ask("conversation.item.create", "conversation.item.done", item=item)
        assert done["item"]["content"][0]["image_url"] == url
        await client.respond(output_modalities=["text"])
    (asked,) = gateway.scripts["thinker"].requests
    assert asked.messages[0].content[0].media.data == file.getvalue()


async def test_voices_speeds_and_formats(gateway):
    async with session(gateway) as client:
        output = {"voice": "ETHAN", "format": {"type": "audio/pcmu"}}
        updated = await client.ask("session.update", "session.updated", session={"audio": {"output": output}})
        assert updated["session"]["audio"]["output"]["format"]["type"] == "audio/pcmu"
        await client.say("Hi")
        events = await client.respond()
        assert len(sound_of(events)) == pytest.approx(len(PCM16) / 2 / SAMPLE_RATE_HZ * 8000, abs=20)
        other = {"audio": {"output": {"voice": "chelsie"}}}
        assert (await client.refusal("session.update", session=other))["code"] == "cannot_update_voice"
        unknown = await client.refusal("response.create", response={"audio": {"output": {"voice": "bob"}}})
        assert unknown["param"] == "response.audio.output.voice"
    assert gateway.scripts["talker"].requests[0].speaker == "ethan"
