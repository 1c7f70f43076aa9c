"""A response's items make events that are data; the conversation changes when an event is applied."""

import base64

from prometheus_client import REGISTRY

from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.conversation.items import message
from gateway.dialects.realtime.output import server_events
from gateway.dialects.realtime.output.response_item import OutputCall, OutputMessage
from gateway.dialects.realtime.output.server_events import ItemEvent, NewItem, ResponseEnd, ServerEvent, SoundDelta
from gateway.dialects.realtime.output.sound_quality import SoundQuality
from gateway.dialects.realtime.settings.session import Session

IN_RESPONSE = {"response_id": "resp_1", "output_index": 0}


def test_a_call_is_a_list_of_events():
    call = OutputCall("resp_1", 0, "weather", "call_1")
    opened = call.item.public()
    place = {**IN_RESPONSE, "item_id": call.item.id}
    assert call.open() == [ServerEvent("response.output_item.added", {**IN_RESPONSE, "item": opened})]
    delta = {**place, "call_id": "call_1", "delta": "{}"}
    assert call.arguments("{}") == [ServerEvent("response.function_call_arguments.delta", delta)]
    done = {**place, "call_id": "call_1", "name": "weather", "arguments": "{}"}
    closed = opened | {"status": "completed", "arguments": "{}"}
    assert call.close("completed") == [
        ServerEvent("response.function_call_arguments.done", done),
        ServerEvent("response.output_item.done", {**IN_RESPONSE, "item": closed}),
    ]
    assert call.close("completed") == []


def test_an_item_enters_the_conversation_when_its_event_is_applied():
    conversation, said = Conversation(), message("user", [])
    conversation.add(said)
    output = OutputMessage("resp_1", 0, Session.new("m"), None)
    output.conversation = conversation
    _, added, _ = output.open()
    assert isinstance(added, NewItem)
    assert conversation.find(output.item.id) is None
    event = added.apply(conversation)
    assert event["type"] == "conversation.item.added"
    assert event["previous_item_id"] == said.id
    assert conversation.find(output.item.id) is output.item
    conversation.delete(output.item.id)
    done = ItemEvent("conversation.item.done", {"item": output.item.public()}, output.item).apply(conversation)
    assert done["previous_item_id"] is None


def test_a_full_conversation_leaves_an_item_out():
    conversation, item = Conversation(max_items=0), message("assistant", [])
    assert NewItem("conversation.item.added", {}, item).apply(conversation)["previous_item_id"] is None
    assert conversation.find(item.id) is None


def test_sound_counts_as_sent_when_its_event_is_applied():
    output = OutputMessage("resp_1", 0, Session.new("m"), 24_000)
    output.open()
    (sound,) = output.audio(b"\1\0" * 2400)
    assert isinstance(sound, SoundDelta)
    assert (output.item.sent_ms, output.playback.ends_at) == (0, 0.0)
    event = sound.apply(None)
    assert (event["type"], event["delta"]) == (
        "response.output_audio.delta",
        base64.b64encode(b"\1\0" * 2400).decode(),
    )
    assert output.item.sent_ms == 100
    assert output.playback.ends_at > 0


class PlayedAt:
    """A time that passes when the test says so."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def test_sound_that_is_sent_too_late_is_an_underrun_and_delays_what_follows(monkeypatch):
    clock = PlayedAt()
    monkeypatch.setattr(server_events, "time", clock)
    output = OutputMessage("resp_1", 0, Session.new("m"), 24_000, SoundQuality("a-test"))
    output.open()

    def counted(name: str) -> float | None:
        return REGISTRY.get_sample_value(f"quartet_gateway_{name}", {"transport": "a-test"})

    def send(at_s: float) -> tuple[float | None, float | None, float]:
        """100 ms of sound; underruns, their silence, and when all is played."""
        clock.now_s = 100 + at_s
        (sound,) = output.audio(b"\1\0" * 2400)
        sound.apply(None)
        silence_s = counted("underrun_seconds_total")
        return counted("underruns_total"), silence_s and round(silence_s, 6), round(output.playback.ends_at - 100, 6)

    assert send(0) == (0, 0, 0.1)
    assert send(0.05) == (0, 0, 0.2)
    assert send(0.25) == (1, 0.05, 0.35)
    assert send(0.34) == (1, 0.05, 0.45)  # in time for a player that has paused
    assert send(0.65) == (2, 0.25, 0.75)


def test_items_that_the_prompt_left_out_are_forgotten_with_response_done():
    item = message("user", [])
    end = ResponseEnd("response.done", {"response": {}}, [item])
    assert not item.is_forgotten
    assert end.apply(None)["type"] == "response.done"
    assert item.is_forgotten
