"""What the models of requests take and refuse, whatever the endpoint."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from gateway.answers.audio import AudioRequest
from gateway.answers.diffusion import ImageRequest
from gateway.answers.request import ChatCompletionRequest
from gateway.answers.transcription.request import TranscriptionRequest, TranslationRequest
from gateway.answers.videos import VideoRequest
from gateway.dialects.openai.completions import CompletionRequest
from gateway.dialects.openai.speech import CreateSpeechRequest
from gateway.dialects.openai.speech_stream import SessionConfig
from gateway.dialects.realtime.secrets import ClientSecretRequest
from gateway.dialects.responses.schema import ResponseRequest
from gateway.dialects.vllm.generate import GenerateRequest
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
