"""Names that clients use at their defaults: OpenAI's of models and voices, none at all, and aliases."""

import json
from pathlib import Path

import pytest
from websockets.asyncio.client import connect

from gateway.answers.catalog import Catalog
from gateway.answers.names import OPENAI_VOICES, own_voice
from gateway.errors import ApiError
from gateway.settings import GatewaySettings
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUESTION = (Path(__file__).parents[2] / "cli" / "assets" / "question.wav").read_bytes()
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


# What each client sends if its user has typed an address and a key.
SPEECH = {
    "Open WebUI": {"input": "Yes.", "voice": "alloy", "model": "tts-1"},
    "n8n": {"model": "tts-1-hd", "input": "Yes.", "voice": "nova", "response_format": "mp3", "speed": 1},
    "pipecat": {"input": "Yes.", "model": "gpt-4o-mini-tts", "voice": "alloy", "response_format": "pcm"},
    "LiveKit": {"input": "Yes.", "model": "gpt-4o-mini-tts", "voice": "ash", "speed": 1.0, "stream_format": "sse"},
    "SillyTavern": {"input": "Yes.", "voice": "Onyx", "model": "tts-1", "response_format": "mp3", "speed": 1},
    "no names": {"input": "Yes."},
    "empty names": {"input": "Yes.", "model": "", "voice": None},
    "dated": {"input": "Yes.", "model": "gpt-4o-mini-tts-2025-12-15", "voice": {"id": "willow"}},
}


@pytest.mark.parametrize("client", SPEECH)
async def test_speech_by_default(gateway, client):
    body = SPEECH[client]
    response = await gateway.http.post("/v1/audio/speech", json=body)
    assert response.status_code == 200, response.text
    voices = gateway.app.state.gateway.pipeline.voices
    named = body.get("voice")
    voice = named["id"] if isinstance(named, dict) else named
    expected = voices[OPENAI_VOICES.index(voice.lower()) % len(voices)] if voice else voices[0]
    assert response.headers["x-quartet-voice"] == expected
    assert gateway.scripts["talker"].requests[0].speaker == (expected if voice else "")


HEARING = {
    "Open WebUI": {"model": "whisper-1"},
    "Open WebUI, not set": {"model": ""},
    "n8n": {"model": "whisper-1", "response_format": "json"},
    "pipecat": {"model": "gpt-transcribe", "response_format": "json"},
    "LiveKit": {"model": "gpt-4o-mini-transcribe", "language": "en", "response_format": "json"},
    "whisper.cpp's": {"temperature": "0.0", "response_format": "json"},
}


@pytest.mark.parametrize("client", HEARING)
async def test_transcriptions_by_default(gateway, client):
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        response = await gateway.http.post(path, data=HEARING[client], files={"file": ("a.wav", QUESTION)})
        assert (response.status_code, bool(response.json().get("text"))) == (200, True), response.text


async def test_the_own_name_is_told(gateway):
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        form = {"model": "whisper-1", "stream": "true", "stream_include_usage": "true"}
        told = await gateway.http.post(path, data=form, files={"file": ("a.wav", QUESTION)})
        events = [json.loads(line.removeprefix("data: ")) for line in told.text.split("\n\n") if line]
        assert {event["model"] for event in events} == {"scripted"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/audio/speech", {"model": "whisper-1", "input": "Yes."}),
        ("/v1/audio/speech", {"model": "tts-1", "input": "Yes.", "voice": "aloy"}),
        ("/v1/audio/transcriptions", {"model": "tts-1", "file": "AAAA"}),
        ("/v1/chat/completions", {"model": "tts-1", "messages": MESSAGES}),
        ("/v1/completions", {"model": "whisper-1", "prompt": "hi"}),
        ("/v1/images/generations", {"model": "dall-e-3", "prompt": "a cat"}),
    ],
)
async def test_a_name_of_another_purpose_is_refused(gateway, path, body):
    response = await gateway.http.post(path, json=body)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] in ("model", "voice")


@pytest.mark.parametrize("voice", OPENAI_VOICES)
async def test_one_rule_for_voices(gateway, voice):
    """Speech, chats, token in and token out, and realtime sessions speak in the same voice for a name."""
    talker = gateway.scripts["talker"]
    await gateway.http.post("/v1/audio/speech", json={"input": "Yes.", "voice": voice})
    speaks = {"modalities": ["text", "audio"], "audio": {"voice": voice.upper()}}
    await gateway.chat({"model": "scripted", "messages": MESSAGES} | speaks)
    body = {"token_ids": [1], "speech": {"voice": voice}}
    await gateway.http.post("/inference/v1/generate", json=body)
    voices = gateway.app.state.gateway.pipeline.voices
    assert [start.speaker for start in talker.requests] == [own_voice(voice, voices)] * 3


async def test_own_names_come_first():
    assert own_voice("ALLOY", ["ben", "Alloy"]) == "Alloy"
    assert own_voice("vesper", ["ben", "ada"]) == ["ben", "ada"][OPENAI_VOICES.index("vesper") % 2]
    assert own_voice("alloy", []) is None
    assert own_voice("anna", ["ben"]) is None


@pytest.fixture
def aliased(gateway, monkeypatch):
    aliases = ["scripted=gone", "gpt-5*=scripted", "gpt-*=gone", "whisper-1=scripted", "claude-*=scripted"]
    own = gateway.app.state.gateway
    monkeypatch.setattr(own, "catalog", Catalog(own.pipeline, None, aliases))
    return gateway


async def test_an_alias_is_the_model_everywhere(aliased):
    post = aliased.http.post
    answers = [
        await post("/v1/chat/completions", json={"model": "gpt-5-mini", "messages": MESSAGES}),
        await post("/v1/completions", json={"model": "gpt-5", "prompt": "hi"}),
        await post("/v1/completions", json={"model": "scripted", "prompt": "hi"}),
        await post("/v1/responses", json={"model": "claude-x", "input": "hi"}),
        await post("/inference/v1/generate", json={"model": "gpt-5", "token_ids": [1]}),
        await post("/tokenize", json={"model": "gpt-5", "prompt": "hi"}),
        await post("/v1/audio/speech", json={"model": "gpt-5", "input": "Yes."}),
        await post("/v1/audio/transcriptions", data={"model": "gpt-5"}, files={"file": ("a.wav", QUESTION)}),
        await aliased.http.get("/v1/models/gpt-5"),
    ]
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert [answers[i].json()["model"] for i in range(4)] == ["scripted"] * 4
    assert answers[-1].json()["id"] == "scripted"
    listed = (await aliased.http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["scripted"]


async def test_an_alias_of_nothing_names_it(aliased):
    status, error = await aliased.refusal({"model": "gpt-4o", "messages": MESSAGES})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'gpt-4o' is an alias of 'gone', which does not exist here; this server has 'scripted'" in error["message"]


@pytest.mark.parametrize("model", ["gpt-realtime-2.1-mini", "gpt-live-1", "gpt-4o-transcribe", "scripted", None])
async def test_realtime_by_default(gateway, model):
    query = "" if model is None else f"?model={model}"
    async with connect(f"{gateway.url.replace('http', 'ws')}/v1/realtime{query}") as socket:
        assert json.loads(await socket.recv())["session"]["model"] == "scripted"


async def test_lists_of_voices_and_models_have_objects(gateway):
    body = (await gateway.http.get("/v1/audio/voices")).json()
    names = gateway.app.state.gateway.pipeline.voices
    assert body["voices"] == [{"id": name, "name": name} for name in names]
    assert (await gateway.http.get("/v1/audio/models")).json() == {"models": [{"id": "scripted", "name": "scripted"}]}


@pytest.mark.parametrize("alias", ["gpt-5", "=scripted", "gpt-5="])
async def test_what_is_no_alias_does_not_start(alias):
    with pytest.raises(ValueError, match="is no alias: write it as GLOB=MODEL"):
        GatewaySettings(pipeline=Path("unused.yaml"), model_alias=[alias])


async def test_a_purpose_that_nothing_has_is_named(gateway):
    catalog = gateway.app.state.gateway.catalog
    with pytest.raises(ApiError, match="nothing here makes image"):
        catalog.stage_for("image", catalog.meant("dall-e-3", "image"))
