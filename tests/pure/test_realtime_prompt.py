"""What the thinker is told of a realtime conversation: answers as they were sampled, sounds that stay as they are."""

import io
from array import array
from typing import Any

import numpy as np
import pytest
import soundfile

from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.conversation.items import Item, SampledAnswer, message, spoken
from gateway.dialects.realtime.conversation.prompt import Prompt
from gateway.dialects.realtime.conversation.truncation import truncate
from gateway.dialects.realtime.settings.session import Session
from quartet.v1 import thinker_pb2
from services.families.qwen3_omni.thinker import Qwen3OmniThinker
from services.thinker.family import load_checkpoint
from services.thinker.template import ChatTemplate
from tests.support.clients.realtime_client import base64_of, session
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
IDS = [11, 12, 13]
LAMP = {"type": "function", "name": "lamp", "parameters": {"type": "object", "properties": {}}}


def user(text: str) -> Item:
    return message("user", [{"type": "input_text", "text": text}])


def call(id: str = "call") -> Item:
    head = {"id": id, "object": "realtime.item", "type": "function_call", "status": "completed"}
    return Item({**head, "name": "lamp", "call_id": "call_1", "arguments": '{"on":true}'})


def said(text: str = "Sure.", id: str = "said") -> Item:
    item = message("assistant", [{"type": "output_audio", "transcript": text}], id=id)
    item.sent_ms = 1000
    return item


def output() -> Item:
    head = {"id": "output", "object": "realtime.item", "type": "function_call_output", "status": "completed"}
    return Item({**head, "call_id": "call_1", "output": "done"})


def conversation() -> Conversation:
    """An answer that speaks and calls, and what came of the call."""
    result = Conversation()
    answer = [said(), call()]
    sampled = SampledAnswer(array("i", IDS), tuple(item.id for item in answer))
    for item in answer:
        item.sampled = sampled
    for item in (user("Light"), *answer, output()):
        result.add(item)
    return result


def messages(gateway: Running, items: list[Item]) -> list[thinker_pb2.ChatMessage]:
    told = Session.new("scripted").updated({"type": "realtime", "instructions": ""})
    return list(Prompt(told, items).job(gateway.app.state.gateway, "r").starts["thinker"].messages)


async def test_an_answer_that_speaks_and_calls_is_one_message_of_its_ids(speech_gateway):
    _, answer, tool = messages(speech_gateway, conversation().context())
    assert (answer.role, list(answer.token_ids)) == ("assistant", IDS)
    assert tool.role == "tool"


def _delete_call(talk: Conversation) -> None:
    talk.delete("call")


def _delete_message(talk: Conversation) -> None:
    talk.delete("said")


def _cut(talk: Conversation) -> None:
    item = talk.find("said")
    assert item is not None
    truncate(item, 0, 1000)


def _put_between(talk: Conversation) -> None:
    talk.add(user("wait"), "said")


def _write_anew(talk: Conversation) -> None:
    talk.delete("said")
    talk.add(said("No.", id="said"), talk.previous_id("call"))


def _forget(talk: Conversation) -> None:
    for item in talk.context()[:2]:
        item.is_forgotten = True


@pytest.mark.parametrize("change", [_delete_call, _delete_message, _cut, _put_between, _write_anew, _forget])
async def test_an_answer_that_was_changed_is_told_by_its_text(speech_gateway, change):
    talk = conversation()
    change(talk)
    told = messages(speech_gateway, talk.context())
    assert not any(each.token_ids for each in told)
    assert sum(len(each.tool_calls) for each in told) == (talk.find("call") is not None)
    left = [item.content[0]["transcript"] for item in talk.context() if item.role == "assistant"]
    assert [part.text for each in told if each.role == "assistant" for part in each.content] == left


async def test_calls_of_others_do_not_hide_behind_ids(speech_gateway):
    answer = said()
    answer.sampled = SampledAnswer(array("i", IDS), ("said",))
    first, second = messages(speech_gateway, [answer, call()])
    assert (list(first.token_ids), len(first.tool_calls)) == (IDS, 0)
    assert (list(second.token_ids), len(second.tool_calls)) == ([], 1)


SCRIPTS: dict[str, tuple[dict[str, Any], bool]] = {
    "an answer": ({}, True),
    "a call": ({"tool_call": True}, True),
    "cut short": ({"too_long": True}, True),
    "not reusable": ({"ids_reusable": False}, False),
}


@pytest.mark.parametrize("name", SCRIPTS)
async def test_the_next_turn_has_the_ids_of_the_one_before(speech_gateway, name):
    script, has_ids = SCRIPTS[name]
    thinker = speech_gateway.scripts["thinker"]
    vars(thinker).update(script)
    async with session(speech_gateway) as client:
        for _ in range(2):
            await client.say("Hi")
            await client.respond(tools=[LAMP])
    first, second = thinker.requests
    assert not any(each.token_ids for each in first.messages)
    answer = next(each for each in second.messages if each.role == "assistant")
    assert list(answer.token_ids) == ([0, 1, 2] if has_ids else [])
    assert bool(answer.tool_calls) == (name == "a call" and not has_ids)
    said = "" if has_ids or name == "a call" else "".join(PIECES)
    assert "".join(part.text for part in answer.content) == said


async def test_an_answer_that_is_cut_afterwards_has_no_ids(speech_gateway):
    async with session(speech_gateway) as client:
        await client.say("Hi")
        (item,) = (await client.respond())[-1]["response"]["output"]
        where = {"item_id": item["id"], "content_index": 0, "audio_end_ms": 10}
        await client.ask("conversation.item.truncate", "conversation.item.truncated", **where)
        await client.say("And now?")
        await client.respond()
    assert not any(each.token_ids for each in speech_gateway.scripts["thinker"].requests[-1].messages)


async def test_sounds_are_the_same_to_the_model_whatever_stands_beside_them(speech_gateway, tiny_checkpoint):
    """Features and ids: the prefix cache knows a sound by both."""
    checkpoint = load_checkpoint(str(tiny_checkpoint))
    assert isinstance(checkpoint, Qwen3OmniThinker)
    rate = checkpoint.sample_rate_hz
    noise = np.random.default_rng(0)
    lengths = (rate, rate + 1, rate + 77, 2 * rate - 3, 3 * rate + 159)
    items = [spoken(noise.integers(-9000, 9000, n, dtype="<i2").tobytes()) for n in lengths]
    told = messages(speech_gateway, items)
    sounds = [soundfile.read(io.BytesIO(each.content[0].media.data), dtype="float32")[0] for each in told]
    for n, sound in zip(lengths, sounds, strict=True):
        assert n < len(sound) < n + rate // 20
    extract = checkpoint.processor.feature_extractor
    together = extract(
        sounds, sampling_rate=rate, padding=True, truncation=False, return_attention_mask=True, return_tensors="np"
    )
    for count in range(1, len(sounds) + 1):
        assert checkpoint.sound_ids(sounds[:count]) == checkpoint.sound_ids(sounds)[:count]
    for i, sound in enumerate(sounds):
        alone = extract(
            [sound], sampling_rate=rate, padding=True, truncation=False, return_attention_mask=True, return_tensors="np"
        )
        frames = int(alone["attention_mask"].sum())
        assert frames == together["attention_mask"][i].sum() == len(sound) // extract.hop_length
        np.testing.assert_array_equal(alone["input_features"][0][:, :frames], together["input_features"][i][:, :frames])
    bare = [np.frombuffer(item.sound[0], "<i2").astype(np.float32) / 32768 for item in items]
    assert checkpoint.sound_ids(bare[:1]) != checkpoint.sound_ids(bare)[:1]  # which is why


async def test_a_spoken_conversation_begins_with_what_was_sampled(speech_gateway, tiny_checkpoint):
    """The prompts of its turns, as the thinker reads them."""
    from services.thinker.config import ThinkerSettings
    from services.thinker.request import read_conversation

    thinker, template = speech_gateway.scripts["thinker"], ChatTemplate(load_checkpoint(str(tiny_checkpoint)))
    pcm = (8000 * np.sin(np.arange(24_000) / 8)).astype("<i2").tobytes()
    off = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
    async with session(speech_gateway) as client:
        await client.ask("session.update", "session.updated", session=off)
        for _ in range(3):
            await client.send("input_audio_buffer.append", audio=base64_of(pcm))
            await client.send("input_audio_buffer.commit")
            await client.respond()

    before: list[int] = []
    assert len(thinker.requests) == 3
    for start in thinker.requests:
        read = read_conversation(start, [], ThinkerSettings(model="none"))
        prompt = template.apply(read)
        assert prompt[: len(before)] == before
        before = [*prompt, 0, 1, 2]
