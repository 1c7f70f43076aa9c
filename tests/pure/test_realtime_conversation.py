"""The items of a realtime conversation, what the model is told of them, and responses that are held back."""

import base64
import json
from array import array
from itertools import pairwise

import pytest

from gateway.dialects.realtime.conversation.conversation import ROOT, Conversation
from gateway.dialects.realtime.conversation.items import Item, SampledAnswer, message, parse_item, parse_items, spoken
from gateway.dialects.realtime.conversation.prompt import Prompt
from gateway.dialects.realtime.conversation.truncation import spoken_text
from gateway.dialects.realtime.events import RealtimeError
from gateway.dialects.realtime.output.outbox import Outbox
from gateway.dialects.realtime.output.responses import Request, Response
from gateway.dialects.realtime.settings.session import Session
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")


def text(of: str, role: str = "user", id: str | None = None) -> Item:
    return message(role, [{"type": "output_text" if role == "assistant" else "input_text", "text": of}], id=id)


def answer(transcript: str, sent_ms: int, status: str = "completed") -> Item:
    item = message("assistant", [{"type": "output_audio", "transcript": transcript}], status, "answer")
    item.sent_ms, item.sampled = sent_ms, SampledAnswer(array("i", [1, 2, 3]), (item.id,))
    return item


def ids(conversation: Conversation) -> list[str]:
    return [item.id for item in conversation.context()]


async def test_items_come_where_the_client_wants_them():
    conversation = Conversation()
    assert conversation.add(text("b", id="b")) is None
    assert conversation.add(text("d", id="d")) == "b"
    assert conversation.add(text("a", id="a"), ROOT) is None
    assert conversation.add(text("c", id="c"), "b") == "b"
    assert ids(conversation) == ["a", "b", "c", "d"]
    assert [conversation.previous_id(id) for id in "abcd"] == [None, "a", "b", "c"]
    conversation.delete("b")
    assert ids(conversation) == ["a", "c", "d"]
    assert conversation.previous_id("c") == "a"


REFUSED = {
    "item_create_duplicate_item_id": lambda conversation: conversation.add(text("x", id="a")),
    "item_create_invalid_previous_item_id": lambda conversation: conversation.add(text("x"), "nobody"),
    "item_retrieve_invalid_item_id": lambda conversation: conversation.require("nobody", "retrieve"),
    "item_delete_invalid_item_id": lambda conversation: conversation.delete("nobody"),
    "item_truncate_invalid_item_id": lambda conversation: conversation.truncate("nobody", 0, 0),
    "invalid_value": lambda conversation: conversation.truncate("a", 0, 0),
    "conversation_too_long": lambda conversation: [conversation.add(text("x")) for _ in range(3)],
}


@pytest.mark.parametrize("code", REFUSED)
async def test_what_is_wrong_is_refused(code):
    conversation = Conversation(max_items=3)
    conversation.add(text("a", id="a"))
    with pytest.raises(RealtimeError) as refused:
        REFUSED[code](conversation)
    assert refused.value.code == code
    assert "a" in ids(conversation)


async def test_a_conversation_has_a_size():
    conversation = Conversation(max_bytes=100_000)
    conversation.add(spoken(bytes(64_000)))
    with pytest.raises(RealtimeError, match="larger"):
        conversation.add(spoken(bytes(64_000)))
    assert len(conversation.context()) == 1


async def test_truncation_keeps_what_was_heard():
    conversation = Conversation()
    conversation.add(answer("one two three four five", 4000))
    conversation.truncate("answer", 0, 2000)
    (item,) = conversation.context()
    assert (item.content[0]["transcript"], item.sent_ms, item.sampled) == ("one two", 2000, None)
    with pytest.raises(RealtimeError, match="2000 ms"):
        conversation.truncate("answer", 0, 2001)
    conversation.truncate("answer", 0, 0)
    assert item.content[0]["transcript"] == ""


async def test_what_was_heard_never_grows_when_less_is():
    for words in ("one two three four five", "你好，今天天气很好。", ""):
        for complete in (True, False):
            parts = [spoken_text(words, end_ms, 4000, complete) for end_ms in range(0, 4001, 50)]
            assert all(later.startswith(earlier) for earlier, later in pairwise(parts))
            assert parts[0] == ""
            assert parts[-1] == words or not complete
    ahead = "word " * 200  # written, but one second of it was spoken
    assert len(spoken_text(ahead, 1000, 1000, complete=False)) < 20


BAD_ITEMS = {
    "item": [],
    "item.type": {"type": "mcp_call"},
    "item.id": {"type": "message", "id": ""},
    "item.role": {"type": "message", "role": "robot"},
    "item.content": {"type": "message", "role": "user", "content": []},
    "item.content[0]": {"type": "message", "role": "user", "content": ["Hi"]},
    "item.content[0].type": {"type": "message", "role": "user", "content": [{"type": "output_text", "text": "Hi"}]},
    "item.content[0].text": {"type": "message", "role": "user", "content": [{"type": "input_text"}]},
    "item.content[0].audio": {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": "?"}]},
    "item.name": {"type": "function_call", "arguments": "{}"},
    "item.output": {"type": "function_call_output", "call_id": "c"},
}


@pytest.mark.parametrize("param", BAD_ITEMS)
async def test_a_wrong_item_names_its_member(param):
    with pytest.raises(RealtimeError) as refused:
        parse_item(BAD_ITEMS[param], "audio/pcm")
    assert refused.value.param == param


@pytest.mark.parametrize(("audio_format", "bytes_per_s"), [("audio/pcm", 48_000), ("audio/pcmu", 8000)])
async def test_sound_is_read_to_its_end(audio_format, bytes_per_s):
    part = {"type": "input_audio", "audio": base64.b64encode(bytes(bytes_per_s)).decode()}
    item = parse_item({"type": "message", "role": "user", "content": [part]}, audio_format)
    assert len(item.sound[0]) == 2 * 16_000
    assert "audio" not in json.dumps(item.public()["content"][0]).replace("input_audio", "")


async def test_references_are_looked_up():
    conversation = Conversation()
    conversation.add(text("Hi", id="a"))
    (found,) = parse_items([{"type": "item_reference", "id": "a"}], "audio/pcm", conversation.find)
    assert found is conversation.find("a")
    with pytest.raises(RealtimeError) as refused:
        parse_items([{"type": "item_reference", "id": "b"}], "audio/pcm", conversation.find)
    assert refused.value.param == "response.input[0].id"


def held(gateway: Running, conversation: Conversation) -> tuple[Response, Outbox]:
    """A response that is held back."""
    outbox, session = Outbox(), Session.new("scripted")
    prompt = Prompt(session, [text("Hi")])
    response = Response(gateway.app.state.gateway, Request(prompt, conversation=conversation), outbox, speculative=True)
    return response, outbox


async def test_a_response_is_held_back_until_it_is_released(speech_gateway):
    conversation = Conversation()
    response, outbox = held(speech_gateway, conversation)
    task = response.task
    await task  # made to its end
    assert (list(outbox.texts), len(conversation.context())) == ([], 0)
    conversation.add(text("Hi", id="user"))  # what it answers comes before it
    await response.release()
    events = [json.loads(each) for each in outbox.texts]
    assert events[0]["type"] == "response.created"
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["response"]["status"] == "completed"
    added = next(event for event in events if event["type"] == "conversation.item.added")
    assert added["previous_item_id"] == "user"
    user, item = conversation.context()
    assert (user.id, item.content[0]["transcript"]) == ("user", "".join(PIECES))
    assert item.sampled == SampledAnswer(array("i", [0, 1, 2]), (item.id,))
    assert item.sent_ms == 240


async def test_a_response_that_is_dropped_leaves_no_trace(speech_gateway):
    speech_gateway.scripts["code2wav"].hold = True
    conversation = Conversation()
    response, outbox = held(speech_gateway, conversation)
    await speech_gateway.until(lambda: speech_gateway.scripts["code2wav"].running == 1)
    await response.drop()
    assert (list(outbox.texts), len(conversation.context())) == ([], 0)
    await speech_gateway.until(lambda: not any(script.running for script in speech_gateway.scripts.values()))


async def test_a_response_released_while_it_is_made_tells_all_in_order(speech_gateway):
    code2wav = speech_gateway.scripts["code2wav"]
    code2wav.hold, code2wav.after = True, 1
    conversation = Conversation()
    response, outbox = held(speech_gateway, conversation)
    task = response.task
    await code2wav.holding.wait()
    await response.release()
    code2wav.go_on()
    await task
    told = [json.loads(each)["type"] for each in outbox.texts]
    assert told[:3] == ["response.created", "response.output_item.added", "conversation.item.added"]
    assert told[-1] == "response.done"
    assert told.count("response.output_audio.delta") >= 3
