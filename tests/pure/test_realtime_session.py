"""Sessions of /v1/realtime."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.realtime import (
    RealtimeServerEvent,
    RealtimeSessionCreateRequest,
    RealtimeTranscriptionSessionCreateRequest,
    SessionCreatedEvent,
    SessionUpdatedEvent,
)
from openai.types.realtime.client_secret_create_response import Session as SecretSession
from pydantic import TypeAdapter

from gateway.answers.names import OPENAI_VOICES
from gateway.dialects.realtime.events import RealtimeError, server_event
from gateway.dialects.realtime.settings.session import RetentionRatio, Session
from gateway.dialects.realtime.settings.session_config import SemanticVad, ServerVad

SERVER_EVENTS = TypeAdapter(RealtimeServerEvent)
SECRET_SESSIONS = TypeAdapter(SecretSession)
VOICES = ("Ethan", "Chelsie", "Aiden")
WEATHER = {"type": "function", "name": "weather", "description": "Of a town.", "parameters": {"type": "object"}}
# As the clients send them first.
OPENAI_AGENTS = {
    "type": "realtime",
    "model": "gpt-realtime-2.1",
    "output_modalities": ["audio"],
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24000},
            "transcription": {"model": "gpt-4o-mini-transcribe"},
            "turn_detection": {"type": "semantic_vad", "interrupt_response": True},
        },
        "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "ash", "speed": 1.0},
    },
    "tools": [WEATHER],
    "tracing": "auto",
}
LIVEKIT = {
    "type": "realtime",
    "model": "gpt-realtime",
    "output_modalities": ["audio"],
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24000},
            "noise_reduction": None,
            "transcription": {"model": "gpt-4o-mini-transcribe"},
            "turn_detection": {
                "type": "semantic_vad",
                "create_response": True,
                "eagerness": "medium",
                "interrupt_response": True,
            },
        },
        "output": {"format": {"type": "audio/pcm", "rate": 24000}, "speed": 1.0, "voice": "marin"},
    },
    "max_output_tokens": "inf",
    "tool_choice": "auto",
    "tracing": None,
}


@pytest.fixture
def session() -> Session:
    return Session.new("own-model", VOICES)


def instructions_of(session: Session) -> str:
    return session.response_config.instructions


def speed_of(session: Session) -> float:
    return session.response_config.audio.output.speed


def test_a_model_without_speech_answers_in_text(session):
    silent = Session.new("own-model", speaks=False)
    assert silent.modalities == ("text",)
    assert check_echo(silent)["output_modalities"] == ["text"]
    for patch in ({"instructions": "Be brief."}, {"output_modalities": None}, {"output_modalities": ["text"]}):
        assert silent.updated(patch).modalities == ("text",)
    written = silent.updated({"type": "transcription"})
    assert written.updated({"type": "realtime"}).modalities == ("text",)
    error = refused(silent, {"output_modalities": ["audio"]})
    assert (error.code, error.param) == ("invalid_value", "session.output_modalities")
    assert "no speech" in str(error)


def with_input(**members: Any) -> dict[str, Any]:
    return {"audio": {"input": members}}


def with_output(**members: Any) -> dict[str, Any]:
    return {"audio": {"output": members}}


def refused(session: Session, patch: dict[str, Any]) -> RealtimeError:
    before = session.public()
    with pytest.raises(RealtimeError) as caught:
        session.updated(patch)
    assert session.public() == before
    return caught.value


def check_echo(session: Session) -> dict[str, Any]:
    """What clients are shown, after openai's types had their look at it."""
    shown = json.loads(json.dumps(session.public()))
    request = RealtimeSessionCreateRequest if session.type == "realtime" else RealtimeTranscriptionSessionCreateRequest
    for name in ("session.created", "session.updated"):
        event = SERVER_EVENTS.validate_python(server_event(name, session=shown))
        assert isinstance(event, SessionCreatedEvent | SessionUpdatedEvent)
        assert isinstance(event.session, request)
    SECRET_SESSIONS.validate_python(shown)
    return shown


def test_a_new_session_is_shown_whole_with_openais_defaults(session):
    shown = check_echo(session)
    assert shown.pop("id").startswith("sess_")
    vad = {"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": 500}
    vad |= {"create_response": True, "interrupt_response": True, "idle_timeout_ms": None}
    pcm = {"type": "audio/pcm", "rate": 24000}
    assert shown == {
        "object": "realtime.session",
        "type": "realtime",
        "model": "own-model",
        "expires_at": None,
        "output_modalities": ["audio"],
        "instructions": "",
        "audio": {
            "input": {"format": pcm, "transcription": None, "noise_reduction": None, "turn_detection": vad},
            "output": {"format": pcm, "voice": "Ethan", "speed": 1.0},
        },
        "include": None,
        "max_output_tokens": "inf",
        "tools": [],
        "tool_choice": "auto",
        "truncation": "auto",
        "tracing": None,
        "prompt": None,
    }


def test_a_new_session_means_what_it_shows(session):
    assert (session.type, session.modalities, session.response_config.instructions) == ("realtime", ("audio",), "")
    output = session.response_config.audio.output
    assert (session.input_format, output.format.type) == ("audio/pcm", "audio/pcm")
    assert (session.transcription, session.turn_detection) == (None, ServerVad())
    assert (session.voice, output.speed, session.max_output_tokens) == (None, 1.0, None)
    assert (session.tools, session.tool_choice) == ((), ("auto", None))
    assert session.truncation == "auto"


@pytest.mark.parametrize("patch", [OPENAI_AGENTS, LIVEKIT], ids=["openai-agents", "LiveKit"])
def test_what_clients_send_first_is_taken_and_echoed_but_for_the_model(session, patch):
    updated = session.updated(patch)
    shown = check_echo(updated)
    assert shown["model"] == "own-model"
    for name in patch.keys() - {"model", "audio"}:
        assert shown[name] == patch[name]
    for direction, members in patch["audio"].items():
        for name, value in members.items():
            echoed = shown["audio"][direction][name]
            assert echoed == value or echoed.items() >= value.items()
    assert isinstance(updated.turn_detection, SemanticVad)
    assert updated.voice in VOICES


def test_updates_merge_deep_and_leave_the_session_before_as_it_was(session):
    first = session.updated(with_input(turn_detection={"type": "server_vad", "threshold": 0.7}))
    second = first.updated(with_input(turn_detection={"silence_duration_ms": 200.0}) | {"instructions": "Be brief."})
    third = second.updated(with_output(speed=1.5) | {"max_output_tokens": 5, "include": ["a"]})
    assert third.turn_detection == ServerVad(threshold=0.7, silence_duration_ms=200)
    assert (instructions_of(third), speed_of(third), third.max_output_tokens) == ("Be brief.", 1.5, 5)
    assert third.public()["include"] == ["a"]
    assert (instructions_of(first), speed_of(second), session.turn_detection) == ("", 1.0, ServerVad())
    assert third.id == session.id


def test_another_kind_of_turn_detection_or_format_keeps_nothing_of_the_one_before(session):
    semantic = session.updated(with_input(turn_detection={"type": "semantic_vad", "eagerness": "high"}))
    assert check_echo(semantic)["audio"]["input"]["turn_detection"] == {
        "type": "semantic_vad",
        "eagerness": "high",
        "create_response": True,
        "interrupt_response": True,
    }
    formats = {"input": {"format": {"type": "audio/pcma"}}, "output": {"format": {"type": "audio/pcmu"}}}
    g711 = session.updated({"audio": formats})
    assert (g711.input_format, g711.response_config.audio.output.format.type) == ("audio/pcma", "audio/pcmu")
    assert check_echo(g711)["audio"]["input"]["format"] == {"type": "audio/pcma"}


@pytest.mark.parametrize("off", [None, False])
def test_turn_detection_is_switched_off_and_stays_so(session, off):
    manual = session.updated(with_input(turn_detection=off)).updated({"instructions": "x"})
    assert manual.turn_detection is None
    assert check_echo(manual)["audio"]["input"]["turn_detection"] is None
    assert manual.updated(with_input(turn_detection={"threshold": 0.2})).turn_detection == ServerVad(threshold=0.2)


def test_null_takes_back_to_the_default(session):
    changed = session.updated(OPENAI_AGENTS | {"instructions": "x", "max_output_tokens": 9, "unknown": 1})
    nulls = {"instructions": None, "max_output_tokens": None, "tools": None, "tracing": None, "unknown": None}
    cleared = changed.updated(nulls | with_input(transcription=None) | with_output(voice=None))
    assert (instructions_of(cleared), cleared.max_output_tokens, cleared.tools) == ("", None, ())
    cleared = changed.updated(nulls | {"audio": {"input": {"transcription": None}, "output": None}})
    assert (cleared.transcription, cleared.voice) == (None, None)
    assert isinstance(cleared.turn_detection, SemanticVad)
    assert "unknown" not in check_echo(cleared)


def test_what_is_not_served_is_kept_and_echoed(session):
    patch = {
        "tracing": {"workflow_name": "w", "group_id": None},
        "reasoning": {"effort": "low"},
        "prompt": {"id": "p", "variables": {"a": "b"}},
        "parallel_tool_calls": False,
        "new_in_2027": {"deep": [1, {"er": None}]},
        "audio": {
            "new": 1,
            "input": {"noise_reduction": {"type": "near_field"}, "transcription": {"keywords": ["a"], "delay": "low"}},
            "output": {"new": 2},
        },
    }
    shown = check_echo(session.updated(patch).updated({"instructions": "x"}))
    assert {name: shown[name] for name in patch if name != "audio"} == {k: v for k, v in patch.items() if k != "audio"}
    assert (shown["audio"]["new"], shown["audio"]["output"]["new"]) == (1, 2)
    assert shown["audio"]["input"]["noise_reduction"] == {"type": "near_field"}
    assert shown["audio"]["input"]["transcription"].items() >= {"keywords": ["a"], "delay": "low"}.items()


def test_a_client_cannot_set_what_is_the_servers(session):
    shown = session.updated({"id": "x", "object": "y", "model": "z", "expires_at": 1}).public()
    assert shown == session.public()


@pytest.mark.parametrize(
    ("patch", "param", "code"),
    [
        ({"type": "translation"}, "type", "invalid_value"),
        ({"type": ["realtime"]}, "type", "invalid_value"),
        ({"instructions": 5}, "instructions", "invalid_type"),
        ({"output_modalities": ["text", "audio"]}, "output_modalities", "invalid_value"),
        ({"output_modalities": "text"}, "output_modalities", "invalid_type"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": True}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": "many"}, "max_output_tokens", "invalid_value"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools[1]", "invalid_value"),
        ({"tools": [WEATHER, {"name": 3}]}, "tools[1].name", "invalid_type"),
        ({"tools": [WEATHER | {"parameters": "x"}]}, "tools[0].parameters", "invalid_type"),
        ({"tool_choice": "weather"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "function": "x"}}, "tool_choice", "invalid_value"),
        ({"truncation": "middle"}, "truncation", "invalid_value"),
        ({"truncation": {"type": "retention_ratio", "retention_ratio": 2}}, "truncation", "invalid_value"),
        ({"audio": []}, "audio", "invalid_type"),
        ({"audio": {"input": "x"}}, "audio.input", "invalid_type"),
        (with_input(format={"type": "audio/opus"}), "audio.input.format.type", "invalid_value"),
        (with_input(format={"type": "audio/pcm", "rate": 16000}), "audio.input.format", "invalid_value"),
        (with_input(transcription={"language": 1}), "audio.input.transcription.language", "invalid_type"),
        (with_input(turn_detection={"type": "none"}), "audio.input.turn_detection", "invalid_value"),
        (with_input(turn_detection={"threshold": 1.5}), "audio.input.turn_detection.threshold", "invalid_value"),
        (
            with_input(turn_detection={"type": "semantic_vad", "eagerness": "mad"}),
            "audio.input.turn_detection.eagerness",
            "invalid_value",
        ),
        (
            with_input(turn_detection={"silence_duration_ms": "1"}),
            "audio.input.turn_detection.silence_duration_ms",
            "invalid_type",
        ),
        (with_output(speed=2), "audio.output.speed", "invalid_value"),
        (with_output(speed="fast"), "audio.output.speed", "invalid_type"),
        (with_output(voice="nobody"), "audio.output.voice", "invalid_value"),
        (with_output(voice=""), "audio.output.voice", "invalid_value"),
    ],
)
def test_a_wrong_member_is_named_and_nothing_is_changed(session, patch, param, code):
    error = refused(session, patch)
    assert (error.param, error.code) == (f"session.{param}", code)
    assert error.message.startswith(f"session.{param}: ")


def test_two_tools_of_one_name_are_refused(session):
    error = refused(session, {"tools": [WEATHER, WEATHER]})
    assert "same name" in error.message


def test_what_is_kept_is_bounded(session):
    error = refused(session, {"unknown": "x" * 2**20})
    assert (error.code, error.param) == ("session_too_large", "session")
    half = session.updated({"unknown": "x" * 2**19})
    assert refused(half, {"more": "x" * 2**19}).code == "session_too_large"


def test_openais_voices_are_dealt_out_to_the_models_and_echoed_as_they_were_asked_for(session):
    spoken = {name: session.updated(with_output(voice=name)).voice for name in OPENAI_VOICES}
    assert set(spoken.values()) == set(VOICES)
    assert (spoken["alloy"], spoken["ash"], spoken["marin"], spoken["cedar"]) == ("Ethan", "Chelsie", "Aiden", "Ethan")
    asked = session.updated(with_output(voice={"id": "Marin"}))
    assert (asked.voice, asked.public()["audio"]["output"]["voice"]) == ("Aiden", "Marin")
    assert session.updated(with_output(voice="CHELSIE")).voice == "Chelsie"
    own = Session.new("m", ["Ethan", "Alloy"]).updated(with_output(voice="alloy"))
    assert own.voice == "Alloy"


def test_any_voice_is_taken_while_the_models_are_not_known():
    unknown_yet = Session.new("m")
    assert check_echo(unknown_yet)["audio"]["output"]["voice"] is None
    assert unknown_yet.updated(with_output(voice="marin")).voice == "marin"


def test_tools_of_other_kinds_are_kept_unused_and_without_their_secrets(session):
    remote = {"type": "mcp", "server_label": "x", "server_url": "https://x.test"}
    updated = session.updated({"tools": [remote | {"authorization": "secret", "headers": {"a": "secret"}}, WEATHER]})
    assert [tool.name for tool in updated.tools] == ["weather"]
    assert check_echo(updated)["tools"] == [remote, WEATHER]


@pytest.mark.parametrize(
    ("choice", "means"),
    [
        ("required", ("required", None)),
        ({"type": "function", "name": "weather"}, ("function", "weather")),
        ({"type": "function", "function": {"name": "weather"}}, ("function", "weather")),
        ({"type": "mcp", "server_label": "x"}, ("auto", None)),
    ],
)
def test_tool_choice(session, choice, means):
    updated = session.updated({"tools": [WEATHER], "tool_choice": choice})
    check_echo(updated)
    assert updated.tool_choice == means


def test_truncation(session):
    assert session.updated({"truncation": "disabled"}).truncation == "disabled"
    cut = session.updated(
        {"truncation": {"type": "retention_ratio", "retention_ratio": 0.8, "token_limits": {"post_instructions": 900}}}
    )
    check_echo(cut)
    assert cut.truncation == RetentionRatio(0.8, 900)


def test_a_transcription_session_always_transcribes_and_never_answers():
    session = Session.new("m", VOICES, "transcription")
    shown = check_echo(session)
    assert shown.keys() == {"id", "object", "type", "audio", "include", "expires_at"}
    assert shown["audio"].keys() == {"input"}
    patch = {"type": "transcription"} | with_input(transcription={"model": "whisper-1", "language": "de"})
    assert shown["audio"]["input"]["transcription"].keys() == {"model", "language", "prompt"}, "pipecat takes no more"
    updated = session.updated(patch).updated(with_input(transcription={"prompt": "Quartet"}))
    check_echo(updated)
    transcription = updated.transcription
    assert transcription
    assert (transcription.model, transcription.language, transcription.prompt) == ("whisper-1", "de", "Quartet")
    detection = updated.turn_detection
    assert detection
    assert (detection.create_response, detection.interrupt_response) == (False, False)
    assert updated.updated(with_input(transcription=None)).transcription is not None


def test_an_update_of_the_other_type_keeps_the_audio_input(session):
    patch = {"type": "transcription"} | with_input(turn_detection={"silence_duration_ms": 700})
    heard = session.updated(OPENAI_AGENTS | with_input(format={"type": "audio/pcmu"})).updated(
        {"type": "transcription"}
    )
    assert (heard.type, heard.input_format, heard.tools) == ("transcription", "audio/pcmu", ())
    assert check_echo(heard)["id"] == session.id
    detection = session.updated(patch).turn_detection
    assert isinstance(detection, ServerVad)
    assert detection.silence_duration_ms == 700
    back = heard.updated({"type": "realtime"})
    assert (back.type, back.input_format) == ("realtime", "audio/pcmu")
    check_echo(back)


def test_one_response_may_be_otherwise_than_its_session(session):
    updated = session.updated({"instructions": "Session.", "tools": [WEATHER]})
    once = updated.for_response(
        {
            "conversation": "none",
            "input": [],
            "metadata": {"a": "b"},
            "instructions": "Once.",
            "output_modalities": ["text"],
            "tools": [],
            "max_output_tokens": 7,
            "audio": {"output": {"voice": "cedar"}},
        }
    )
    assert (instructions_of(once), once.modalities, once.tools, once.max_output_tokens) == ("Once.", ("text",), (), 7)
    assert (once.voice, updated.voice, instructions_of(updated)) == ("Ethan", None, "Session.")
    assert updated.for_response(None) == updated.for_response({}) == updated
    for response, param in (
        ({"max_output_tokens": -1}, "response.max_output_tokens"),
        ({"audio": {"output": {"voice": "nobody"}}}, "response.audio.output.voice"),
        ({"audio": 1}, "response.audio"),
    ):
        with pytest.raises(RealtimeError) as caught:
            updated.for_response(response)
        assert caught.value.param == param


NAMES = (
    "type audio input output format rate voice id speed turn_detection threshold transcription tools tool_choice "
    + "name function truncation retention_ratio token_limits output_modalities max_output_tokens include x"
).split()
TEXTS = ("realtime", "transcription", "server_vad", "semantic_vad", "audio/pcm", "function", "text", "alloy", "inf", "")
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(TEXTS)
)
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
)
PATCHES = st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=4)


@settings(max_examples=200, deadline=None)
@given(PATCHES | st.builds(lambda patch: {"audio": {"input": patch, "output": patch}}, PATCHES), PATCHES)
def test_whatever_a_client_sends_is_merged_or_refused(patch, response):
    session = Session.new("m", VOICES)
    with suppress(RealtimeError):
        session = session.updated(patch)
        session.for_response(response)
    json.dumps(session.public())
    means = [name for name in dir(Session) if isinstance(getattr(Session, name), property)]
    assert len([getattr(session, name) for name in means]) >= 12
    assert session.updated({}).config == session.config


@pytest.mark.parametrize(
    ("patch", "param"), [({"audio": 5}, "session.audio"), ({"audio": {"input": []}}, "session.audio.input")]
)
def test_what_is_no_object_is_told_so(patch, param):
    with pytest.raises(RealtimeError) as caught:
        Session.new("m").updated(patch)
    assert (caught.value.param, caught.value.message) == (param, f"{param}: must be an object")
