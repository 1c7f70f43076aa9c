"""Events of /v1/realtime."""

import base64
import json
from typing import Any

import pytest
from openai.types.realtime import RealtimeClientEvent, RealtimeServerEvent
from pydantic import TypeAdapter

from gateway.dialects.realtime import events
from gateway.dialects.realtime.conversation.items import decode_base64
from gateway.dialects.realtime.events import RealtimeError, error_event, parse, server_event

SERVER_EVENTS = TypeAdapter(RealtimeServerEvent)
OF_EACH_TYPE: list[dict[str, Any]] = [
    {"type": "session.update", "session": {"type": "realtime", "instructions": "Be brief."}},
    {"type": "input_audio_buffer.append", "audio": "AAAA"},
    {"type": "input_audio_buffer.commit"},
    {"type": "input_audio_buffer.clear"},
    {"type": "output_audio_buffer.clear"},
    {
        "type": "conversation.item.create",
        "previous_item_id": "root",
        "item": {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    },
    {"type": "conversation.item.retrieve", "item_id": "item_1"},
    {"type": "conversation.item.delete", "item_id": "item_1"},
    {"type": "conversation.item.truncate", "item_id": "item_1", "content_index": 0, "audio_end_ms": 1500},
    {"type": "response.create", "response": {"output_modalities": ["text"], "metadata": {"client_event_id": "x"}}},
    {"type": "response.cancel", "response_id": "resp_1"},
]


def refused(event: Any) -> RealtimeError:
    with pytest.raises(RealtimeError) as caught:
        parse(event if isinstance(event, str) else json.dumps(event))
    return caught.value


def test_the_event_types_are_those_of_openais_package():
    union = RealtimeClientEvent.__args__[0].__args__  # pyright: ignore[reportAttributeAccessIssue]
    theirs = {event.model_fields["type"].annotation.__args__[0] for event in union}
    assert set(events.CLIENT_EVENT_TYPES) == theirs == {event["type"] for event in OF_EACH_TYPE}


@pytest.mark.parametrize("event", OF_EACH_TYPE, ids=lambda event: event["type"])
def test_an_event_keeps_all_its_members_those_unknown_too(event):
    sent = event | {"event_id": "mine", "new_in_2027": {"a": [1]}}
    assert parse(json.dumps(sent)).model_dump(exclude_unset=True) == sent
    assert parse(json.dumps(event)).event_id is None


def test_optional_members_may_be_null():
    assert parse('{"type": "response.create", "response": null, "event_id": null}').event_id is None
    created = parse('{"type": "conversation.item.create", "item": {}, "previous_item_id": null}')
    assert isinstance(created, events.ItemCreate)
    assert created.previous_item_id is None


@pytest.mark.parametrize(
    ("event", "code", "param"),
    [
        ({"session": {}}, "missing_required_parameter", "type"),
        ({"type": "session.close"}, "invalid_value", "type"),
        ({"type": ["session.update"]}, "invalid_value", "type"),
        ({"type": "session.update"}, "missing_required_parameter", "session"),
        ({"type": "session.update", "session": "x"}, "invalid_type", "session"),
        ({"type": "input_audio_buffer.append", "audio": 3}, "invalid_type", "audio"),
        ({"type": "conversation.item.retrieve", "item_id": ""}, "invalid_value", "item_id"),
        (OF_EACH_TYPE[8] | {"audio_end_ms": -1}, "invalid_value", "audio_end_ms"),
        (OF_EACH_TYPE[8] | {"audio_end_ms": "1"}, "invalid_type", "audio_end_ms"),
        ({"type": "response.create", "response": []}, "invalid_type", "response"),
        ({"type": "response.cancel", "response_id": "r" * 513}, "string_above_max_length", "response_id"),
    ],
)
def test_a_wrong_event_is_refused_by_its_member_and_its_id(event, code, param):
    error = refused(event | {"event_id": "rci_1"})
    assert (error.code, error.param, error.event_id) == (code, param, "rci_1")
    assert error.message.startswith(f"{param}: ")
    assert "instance of" not in error.message
    assert error.kind == "invalid_request_error"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "invalid_json"),
        ('{"type": ', "invalid_json"),
        ('{"type": "session.update", "session": {"speed": NaN}}', "invalid_json"),
        ('{"type": "session.update", "session": {"instructions": "\\ud800"}}', "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ('["session.update"]', "invalid_event"),
        ("null", "invalid_event"),
    ],
    ids=["empty", "cut off", "NaN", "half a surrogate pair", "deep", "list", "null"],
)
def test_what_is_no_event_is_refused(text, code):
    error = refused(text)
    assert (error.code, error.param, error.event_id) == (code, None, None)


def test_an_event_id_of_another_type_is_refused_and_not_repeated():
    error = refused({"type": "response.cancel", "event_id": 7})
    assert (error.code, error.param, error.event_id) == ("invalid_type", "event_id", None)


def test_the_value_of_an_unknown_type_is_shown_in_part():
    assert len(refused({"type": "x" * 1_000_000}).message) < 1000


def test_appended_audio_is_decoded():
    audio = bytes(range(256))
    event = parse(json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(audio).decode()}))
    assert isinstance(event, events.AudioAppend)
    assert decode_base64(event.audio, "audio") == audio


@pytest.mark.parametrize("audio", ["AAAAA", "AA-_", "%%%%", "é"])
def test_audio_that_is_not_base64_is_refused(audio):
    event = parse(json.dumps({"type": "input_audio_buffer.append", "audio": audio, "event_id": "e"}))
    assert isinstance(event, events.AudioAppend)
    with pytest.raises(RealtimeError) as caught:
        decode_base64(event.audio, "audio")
    assert (caught.value.code, caught.value.param) == ("invalid_value", "audio")


@pytest.mark.parametrize("audio", ["AAECAw==\n", "AAE\r\nCAw", " AAECAw "])
def test_audio_with_line_ends_or_without_padding_is_decoded(audio):
    assert decode_base64(audio, "audio") == b"\0\1\2\3"


def test_as_much_audio_as_at_openai_fits_and_no_more():
    head, tail = '{"type": "input_audio_buffer.append", "event_id": "e", "audio": "', '"}'
    event = parse(head + "A" * events.MAX_AUDIO_CHARACTERS + tail)
    assert isinstance(event, events.AudioAppend)
    assert len(decode_base64(event.audio, "audio")) == events.MAX_AUDIO_CHARACTERS * 3 // 4
    error = refused(head + "A" * (events.MAX_AUDIO_CHARACTERS + 4) + tail)
    assert (error.code, error.param, error.event_id) == ("string_above_max_length", "audio", "e")
    assert refused("x" * (events.MAX_EVENT_CHARACTERS + 1)).code == "event_too_large"


def test_server_events_have_ids_of_their_own():
    first, second = (server_event("input_audio_buffer.cleared") for _ in range(2))
    SERVER_EVENTS.validate_python(first)
    assert first["event_id"].startswith("event_")
    assert first["event_id"] != second["event_id"]


def test_an_error_becomes_an_event_with_the_id_of_the_event_at_fault():
    error = error_event(RealtimeError("item_retrieve_invalid_item_id", "no such item", "item_id", "rci_1"))
    assert SERVER_EVENTS.validate_python(error).type == "error"
    assert error["error"] == {
        "type": "invalid_request_error",
        "code": "item_retrieve_invalid_item_id",
        "message": "no such item",
        "param": "item_id",
        "event_id": "rci_1",
    }
    assert error["event_id"] != "rci_1"
    assert error_event(RealtimeError("internal_error", "x", kind="server_error"))["error"]["type"] == "server_error"
