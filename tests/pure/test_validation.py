"""What the models of requests take and refuse, whatever the endpoint."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from gateway import validation
from gateway.answers.audio import AudioRequest
from gateway.answers.diffusion import ImageRequest
from gateway.answers.request import ChatCompletionRequest
from gateway.answers.transcription.request import TranscriptionRequest, TranslationRequest
from gateway.answers.videos import VideoRequest
from gateway.dialects.anthropic.schema import CountRequest, MessagesRequest
from gateway.dialects.openai.completions import CompletionRequest
from gateway.dialects.openai.speech import CreateSpeechRequest
from gateway.dialects.openai.speech_stream import SessionConfig
from gateway.dialects.operators.profiles import StartRequest
from gateway.dialects.realtime.secrets import ClientSecretRequest
from gateway.dialects.realtime.settings.session_config import RealtimeConfig
from gateway.dialects.responses.conversations import ConversationRequest
from gateway.dialects.responses.schema import InputTokensRequest, ResponseRequest
from gateway.dialects.responses.socket import SocketRequest
from gateway.dialects.vllm.request import GenerateRequest
from gateway.dialects.vllm.tokens import DetokenizeRequest, TokenizeRequest
from gateway.errors import ApiError
from gateway.validation import validated, validated_json

MESSAGES = [{"role": "user", "content": "hi"}]
REQUESTS: dict[type[BaseModel], dict[str, Any]] = {
    ChatCompletionRequest: {"model": "m", "messages": MESSAGES, "quartet": {"talker": {}, "thinker": {}}},
    CompletionRequest: {"model": "m", "prompt": "hi"},
    CreateSpeechRequest: {"model": "m", "input": "hi", "quartet": {"talker": {}}},
    SessionConfig: {"type": "session.config", "model": "m"},
    TranscriptionRequest: {"model": "m"},
    TranslationRequest: {"model": "m"},
    ImageRequest: {"model": "m", "prompt": "a cat"},
    VideoRequest: {"model": "m", "prompt": "a cat"},
    AudioRequest: {"model": "m", "prompt": "a bell"},
    ResponseRequest: {"model": "m", "input": "hi", "quartet": {"talker": {}}},
    GenerateRequest: {"token_ids": [1], "sampling_params": {}},
    TokenizeRequest: {"model": "m", "prompt": "hi"},
    DetokenizeRequest: {"model": "m", "tokens": [1]},
    ClientSecretRequest: {"expires_after": {}},
    MessagesRequest: {"model": "m", "max_tokens": 5, "messages": MESSAGES},
    CountRequest: {"model": "m", "messages": MESSAGES},
    SocketRequest: {"type": "response.create", "model": "m", "input": "hi"},
    InputTokensRequest: {"model": "m", "input": "hi"},
    ConversationRequest: {"items": MESSAGES},
    StartRequest: {"seconds": 5},
}
# Null has a meaning of its own there.
TELLING = {(SessionConfig, "non_streaming_mode")}


def with_nulls(model: type[BaseModel], body: dict[str, Any]) -> dict[str, Any]:
    """`body` with all members null that it does not have."""
    nulls = {field.alias or name: None for name, field in model.model_fields.items() if (model, name) not in TELLING}
    given = {
        name: with_nulls(type(getattr(validated(model, body), name)), value) if isinstance(value, dict) else value
        for name, value in body.items()
    }
    return {**nulls, **given}


@pytest.mark.parametrize("model", REQUESTS, ids=lambda model: model.__name__)
def test_null_is_absent(model):
    body = REQUESTS[model]
    nulls = with_nulls(model, body)
    assert validated_json(model, json.dumps(nulls)) == validated_json(model, json.dumps(body))
    assert validated(model, nulls) == validated(model, body)


def models(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        yield from (model, *models(model))


def open_lists(schema: Any, place: str = "") -> Iterator[str]:
    """Places of lists in pydantic's schema that have no end, or whose items make an error each."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "set") and not (
            schema.get("fail_fast") and schema.get("max_length")
        ):
            yield place
        yield from (each for name, inner in schema.items() for each in open_lists(inner, f"{place}.{name}"))
    elif isinstance(schema, list | tuple):
        yield from (each for i, inner in enumerate(schema) for each in open_lists(inner, f"{place}.{i}"))


def test_lists_of_clients_end():
    rooms = ("gateway.answers.", "gateway.dialects.")
    found = {model for model in models(BaseModel) if model.__module__.startswith(rooms)}
    assert {ChatCompletionRequest, MessagesRequest, RealtimeConfig} <= found
    for model in found:
        assert list(open_lists(model.__pydantic_core_schema__)) == [], model


def test_json_of_long_texts_is_read():
    """What a text has of JSON's signs counts for nothing, whatever stands before it."""
    text = '{"a": [1, 2], ' * 40_000 + "\\\\" * 2**19 + '\\"'  # a piece ends in a backslash
    for length in (0, 1, 2, 3):
        content = "x" * length + text
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]})
        for given in (body, body.encode()):
            (message,) = validated_json(ChatCompletionRequest, given).messages
            assert message.model_dump()["content"][0]["text"] == content
    with pytest.raises(ApiError, match="more than 400000 values"):
        validated_json(ChatCompletionRequest, json.dumps({"model": text, "messages": [[]] * 400_000}))


def test_nulls_take_the_time_of_their_number(monkeypatch):
    """Each item has a null that may not be: a validation for each would be the square of it."""
    message = {"role": "assistant", "tool_calls": [{"id": "a", "type": None, "function": {"name": "x"}}]}
    read = []
    monkeypatch.setattr(validation, "_place", lambda *given, place=validation._place: read.append(1) or place(*given))
    request = validated_json(ChatCompletionRequest, json.dumps({"model": "m", "messages": [message] * 500}))
    assert [each.role for each in request.messages] == ["assistant"] * 500
    assert len(read) < 10


# What a client has no use for: names of our classes and functions, tags of unions, pydantic's and Python's own words.
INSIDES = re.compile(
    r"instance of|\(\)|function-|(function|hosted)_tool|\[str|list\[|dict\[|0x|<|discriminator|Strict|Request|NoneType"
)
WRONG = (5, "x", [], {}, True, [5], {"a": 5}, [{"type": "x"}], [{"role": "x"}], [{"role": "user", "content": 5}], 5.5)


def refusals(model: type[BaseModel], body: dict[str, Any]) -> list[ApiError]:
    """That of a body, and that of an object within another."""
    found: list[ApiError] = []
    for validate in (lambda: validated_json(model, json.dumps(body)), lambda: validated(model, body)):
        try:
            validate()
        except ApiError as error:
            found.append(error)
    return found


def stands(param: str, body: Any) -> bool:
    """Whether `body` has it."""
    for word in re.findall(r"[^.\[\]]+", param):
        part = int(word) if word.isdecimal() else word
        if part not in (range(len(body)) if isinstance(body, list) else body):
            return False
        body = body[part]
    return True


@pytest.mark.parametrize("model", REQUESTS, ids=lambda model: model.__name__)
def test_a_refusal_names_a_member_as_the_client_wrote_it(model):
    members = [field.alias or name for name, field in model.model_fields.items()]
    bodies = [(member, REQUESTS[model] | {member: wrong}) for member in members for wrong in WRONG]
    refused = [(member, body, error) for member, body in bodies for error in refusals(model, body)]
    assert refused
    for member, body, error in refused:
        assert error.message.startswith(f"{error.param}: "), error.message
        assert not INSIDES.search(error.message), error.message
        assert re.match(rf"{member}\b", error.param or ""), error.message
        assert stands(error.param or "", body) or error.code == "missing_required_parameter", error.message


PLACES = [
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "b": 1}]}]}, "messages[0].content[0].b"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [5]}, "messages[0]"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json"}}, "response_format.type"),
    ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name"),
    ({"tools": [5]}, "tools[0]"),
    ({"stop": [5]}, "stop[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"audio": {"voice": 5}}, "audio.voice"),
    ({"quartet": {"talker": {"top_k": "x"}}}, "quartet.talker.top_k"),
]


ANTHROPICS = [
    ([{"type": "image", "source": {"type": "base64", "media_type": "image/png"}}], "source.data"),
    ([{"type": "image", "source": {"type": "url", "url": 5}}], "source.url"),
    ([{"type": "image", "source": {}}], "source.type"),
    ([{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text"}]}], "content[0].text"),
    ([{"type": "document", "source": {"type": "text", "data": "x"}, "tilte": "x"}], "tilte"),
]


@pytest.mark.parametrize(
    ("model", "members", "param"),
    [
        *((ChatCompletionRequest, *each) for each in PLACES),
        *(
            (MessagesRequest, {"messages": [{"role": "user", "content": content}]}, f"messages[0].content[0].{param}")
            for content, param in ANTHROPICS
        ),
    ],
)
def test_the_place_of_a_fault(model, members, param):
    with pytest.raises(ApiError) as refused:
        validated_json(model, json.dumps(REQUESTS[model] | members))
    assert refused.value.param == param
    assert not INSIDES.search(refused.value.message), refused.value.message


@pytest.mark.parametrize("model", REQUESTS, ids=lambda model: model.__name__)
def test_null_does_not_hide_another_fault(model):
    body = with_nulls(model, REQUESTS[model]) | {"temprature": None}
    if model.model_config.get("extra") == "forbid":
        with pytest.raises(ApiError) as refused:
            validated_json(model, json.dumps(body))
        assert (refused.value.param, refused.value.code) == ("temprature", "unknown_parameter")
    else:
        validated_json(model, json.dumps(body))


def test_a_required_null_is_missing():
    with pytest.raises(ApiError) as refused:
        validated_json(ChatCompletionRequest, '{"model": "m", "messages": null}')
    assert (refused.value.param, refused.value.code) == ("messages", "missing_required_parameter")
