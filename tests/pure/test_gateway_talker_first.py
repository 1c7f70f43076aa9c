"""A pipeline that begins with a talker, over HTTP: what the user says last is spoken."""

import base64

import pytest
from openai.types.chat import ChatCompletion

from quartet.v1 import talker_pb2
from services.common.errors import InvalidInput, Unavailable
from tests.support.scripted.code2wav import PCM16
from tests.support.scripted.talker import VOICES
from tests.support.systems.gateway import running

PIPELINE = """\
stages:
  talker: {kind: talker, address: 'h:1'}
  code2wav: {kind: code2wav, address: 'h:2', source: talker}
outputs: {speech: code2wav}
"""
MESSAGES = [
    {"role": "system", "content": "not spoken"},
    {"role": "user", "content": "nor this"},
    {"role": "user", "content": [{"type": "text", "text": "Hello,"}, {"type": "text", "text": "sea."}]},
]
TEXT = "Hello,\nsea."
SPEAK = {"model": "scripted", "messages": MESSAGES, "modalities": ["audio"]}


@pytest.fixture
async def gateway(tmp_path):
    file = tmp_path / "talker.yaml"
    file.write_text(PIPELINE)
    async with running(file) as started:
        yield started


@pytest.mark.parametrize("modalities", [["audio"], ["text", "audio"]])
async def test_the_last_message_is_spoken(gateway, modalities):
    audio = {"voice": VOICES[1].upper(), "format": "pcm16"}
    response = await gateway.chat(SPEAK | {"modalities": modalities, "audio": audio, "seed": 5, "n": 2})
    body = ChatCompletion.model_validate_json(response.text)
    for choice in body.choices:
        assert choice.message.audio
        assert base64.b64decode(choice.message.audio.data) == PCM16
        assert choice.message.audio.transcript == choice.message.content == TEXT
        assert choice.finish_reason == "stop"
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (0, 6)
    assert list(response.json()["quartet"]["timings"]) == ["talker", "code2wav"]
    asked: list[talker_pb2.SpeakStart] = gateway.scripts["talker"].requests
    assert [request.text.text for request in asked] == [TEXT, TEXT]
    assert {request.speaker for request in asked} == {VOICES[1]}
    assert sorted(request.sampling.seed for request in asked) == [5, 6]
    assert {request.source.address for request in gateway.scripts["code2wav"].requests} == {
        gateway.stages.addresses["talker"]
    }


async def test_a_stream(gateway):
    events = await gateway.events(SPEAK)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": TEXT}
    audio = [event["choices"][0]["delta"]["audio"] for event in events if event["modality"] == "audio"]
    assert b"".join(base64.b64decode(piece["data"]) for piece in audio) == PCM16
    assert "".join(piece["transcript"] for piece in audio) == TEXT


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"modalities": ["text"]}, "modalities"),
        ({"modalities": None}, "modalities"),
        ({"modalities": ["image"]}, "modalities"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"audio": {"voice": "nobody"}}, "audio.voice"),
        ({"messages": MESSAGES[:1]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages[0].content[0]",
        ),
        ({"model": "other"}, "model"),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(gateway, change, param):
    status, error = await gateway.refusal(SPEAK | change)
    assert (status, error["param"]) == (404 if param == "model" else 400, param)
    assert gateway.scripts["talker"].requests == []


async def test_the_talkers_refusal_of_the_text_is_one_of_the_messages(gateway):
    gateway.scripts["talker"].error = InvalidInput("text", "is empty")
    status, error = await gateway.refusal(SPEAK)
    assert (status, error["param"], error["message"]) == (400, "messages", "messages: is empty")


async def test_a_talker_that_is_gone_is_named(gateway):
    gateway.scripts["talker"].error = Unavailable("draining")
    status, error = await gateway.refusal(SPEAK)
    assert (status, error["code"]) == (503, "stage_unavailable")
    assert "talker" in error["message"]


async def test_what_the_model_is(gateway):
    (model,) = (await gateway.http.get("/v1/models")).json()["data"]
    assert model["id"] == "scripted"
    facts = model["quartet"]
    assert (facts["input_modalities"], facts["output_modalities"]) == (["text"], ["audio"])
    assert facts["voices"] == VOICES
    assert facts["max_context_tokens"] is None


async def test_nothing_here_makes_text_or_images(gateway):
    response = await gateway.http.post("/v1/images/generations", json={"prompt": "a boat"})
    assert response.json()["error"]["message"].endswith("this server makes: speech")
