"""`timestamp_granularities[]=word` over HTTP, with a scripted thinker and a scripted aligner; words of speech."""

import json
import math
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from gateway.listening.silero import RATE_HZ
from gateway.pipeline.config import load_pipeline
from gateway.yaml_source import YamlError
from services.common.errors import InternalError, InvalidInput
from tests.pure.test_gateway_transcriptions import SAID, SPOKEN_S, begins, post, spoken
from tests.support.scripted.aligner import WORD_MS
from tests.support.scripted.code2wav import PCM16, SAMPLE_RATE_HZ
from tests.support.systems.gateway import SPEECH, Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PIPELINE = """\
stages:
  thinker: {kind: thinker, address: 'h:1'}
  aligner: {kind: aligner, address: 'h:2'}
outputs: {text: thinker, words: aligner}
"""
SPEECH_PIPELINE = """\
stages:
  talker: {kind: talker, address: 'h:1'}
  code2wav: {kind: code2wav, source: talker, address: 'h:2'}
  aligner: {kind: aligner, address: 'h:3'}
outputs: {speech: code2wav, words: aligner}
"""
WORDS = SAID.split()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory):
    file = tmp_path_factory.mktemp("aligner") / "aligner.yaml"
    file.write_text(PIPELINE)
    async with running(file) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(started):
    yield started
    await started.reset()


async def ask(gateway: Running, *granularities: str, **fields: Any) -> Any:
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": list(granularities), **fields}
    return await post(gateway, **fields)


async def test_words_have_the_times_of_their_window(gateway):
    body = (await ask(gateway, "word", language="en")).json()
    assert "segments" not in body  # as with OpenAI
    assert [word["word"] for word in body["words"]] == WORDS * 3
    starts = np.array([word["start"] for word in body["words"]]).reshape(3, len(WORDS))
    ends = np.array([word["end"] for word in body["words"]]).reshape(3, len(WORDS))
    assert np.allclose(np.diff(starts), WORD_MS / 1000, atol=0.0011)
    assert np.allclose(ends - starts, WORD_MS / 1000, atol=0.0011)
    requests = sorted(gateway.scripts["aligner"].requests, key=lambda each: each.request_id)
    sound = np.frombuffer(spoken(3), "<i2").astype(np.float64)
    for request, begin_s, first in zip(requests, begins(3), starts[:, 0], strict=True):
        assert (request.text, request.language) == (SAID, "en")
        assert first <= begin_s + SPOKEN_S[0] + 0.1  # the window has padding before its speech
        # the aligner's first sample is at the time that its first word was given: the sound there is the same
        piece = np.frombuffer(request.pcm16, "<i2").astype(np.float64)
        at = round(first * RATE_HZ)
        assert np.corrcoef(piece, sound[at : at + len(piece)])[0, 1] > 0.9


async def test_words_beside_segments(gateway):
    body = (await ask(gateway, "word", "segment")).json()
    assert len(body["segments"]) == 3
    assert len(body["words"]) == 3 * len(WORDS)
    for segment in body["segments"]:
        inside = [word for word in body["words"] if segment["start"] - 0.25 <= word["start"] < segment["end"]]
        assert len(inside) == len(WORDS)
    assert gateway.scripts["aligner"].requests[0].language == ""


async def test_the_aligner_is_asked_for_words_alone(gateway):
    body = (await ask(gateway, "segment")).json()
    assert ("words" in body, len(body["segments"])) == (False, 3)
    assert gateway.scripts["aligner"].requests == []
    plain: dict[str, Any] = {"timestamp_granularities[]": "word"}
    refused = (await post(gateway, **plain)).json()["error"]
    assert refused["param"] == "timestamp_granularities"
    assert "only with response_format verbose_json" in refused["message"]


@pytest.mark.parametrize(
    ("failure", "status", "param"),
    [
        (InvalidInput("language", "'fr' is none that this model gives times for: en"), 400, "language"),
        (InvalidInput("text", "has 101 words"), 400, "file"),
        (InternalError("the aligner's engine failed"), 500, None),
    ],
    ids=["a language", "words", "a fault"],
)
async def test_what_the_aligner_refuses_or_fails_at(gateway, failure, status, param):
    gateway.scripts["aligner"].error = failure
    refused = await ask(gateway, "word", language="fr")
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text


async def test_a_lost_aligner_is_a_503_that_names_it(gateway):
    gateway.stages.set_serving("aligner", False)
    stage = gateway.app.state.gateway.pipeline.by_name["aligner"]
    await gateway.until(lambda: not stage.serving)
    refused = await ask(gateway, "word")
    assert refused.status_code == 503
    assert "aligner" in refused.json()["error"]["message"]
    assert (await ask(gateway, "segment")).status_code == 200
    gateway.stages.set_serving("aligner", True)


async def test_clients_do_not_name_it(gateway):
    """Who looks for a model that hears finds one."""
    models = (await gateway.http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["scripted"]
    assert (await ask(gateway, "word", model="whisper-1")).status_code == 200


async def test_a_pipeline_without_an_aligner_says_what_would_help(speech_gateway):
    refused = await ask(speech_gateway, "word")
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "timestamp_granularities")
    assert "have the server started with --aligner-model, or leave word out" in error["message"]
    assert speech_gateway.scripts["thinker"].requests == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def speaking(tmp_path_factory):
    """A talker that reads texts, with an aligner."""
    file = tmp_path_factory.mktemp("speaking") / "speaking.yaml"
    file.write_text(SPEECH_PIPELINE)
    async with running(file) as gateway:
        yield gateway


async def speak(gateway: Running, **members: Any) -> list[dict[str, Any]]:
    """The events of a speech."""
    body = {"input": "The old king.", "response_format": "pcm", "stream_format": "sse", **members}
    response = await gateway.http.post("/v1/audio/speech", json={"timestamp_granularities": ["word"]} | body)
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.split("\n\n") if line]


@pytest.mark.parametrize("speed", [1.0, 2.0])
async def test_words_of_speech_have_their_times_in_the_file(speaking, speed):
    events = await speak(speaking, speed=speed)
    assert events[-1]["type"] == "speech.audio.done"
    (words,) = [event["words"] for event in events if event["type"] == "speech.audio.words"]
    length_s = len(PCM16) / 2 / SAMPLE_RATE_HZ / speed
    assert [word["word"] for word in words] == ["The", "old", "king."]
    for i, word in enumerate(words):  # the sound ends within the third word
        assert word["start"] == pytest.approx(WORD_MS / 1000 * i / speed, abs=0.001)
        assert word["end"] == pytest.approx(min(WORD_MS / 1000 * (i + 1) / speed, length_s), abs=0.001)
    assert speaking.scripts["aligner"].requests[-1].pcm16 == PCM16
    await speaking.reset()


async def test_pieces_of_speech_follow_each_other(speaking):
    talker, code2wav = (speaking.app.state.gateway.pipeline.info(stage) for stage in ("talker", "code2wav"))
    talker.max_frames = math.ceil(20 * 0.12 * code2wav.sample_rate_hz / code2wav.samples_per_frame)
    try:
        events = await speak(speaking, input="One sentence here. And a second one!")
    finally:
        talker.ClearField("max_frames")
    words = [word for event in events if event["type"] == "speech.audio.words" for word in event["words"]]
    starts = [each.text.text for each in speaking.scripts["talker"].requests]
    assert [word["word"] for word in words] == [word for text in starts for word in text.split()]
    assert len(starts) > 1
    piece_s = len(PCM16) / 2 / SAMPLE_RATE_HZ
    begins = iter(words)
    for number, text in enumerate(starts):
        first = next(begins)
        assert first["start"] == pytest.approx(piece_s * number, abs=0.001)
        for _ in text.split()[1:]:
            next(begins)
    await speaking.reset()


async def test_speech_without_an_aligner_or_without_events(speaking, speech_gateway):
    asked = {"input": "Yes.", "timestamp_granularities": ["word"], "stream_format": "sse"}
    for gateway, members, told in (
        (speech_gateway, {}, "no aligner is here"),
        (speaking, {"stream_format": "audio"}, "only with stream_format sse"),
    ):
        response = await gateway.http.post("/v1/audio/speech", json=asked | members)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "timestamp_granularities")
        assert told in error["message"]
    assert all(event["type"] != "speech.audio.words" for event in await speak(speaking, timestamp_granularities=None))


async def test_an_aligner_is_added_to_a_file_that_has_none(tmp_path):
    added = load_pipeline(SPEECH, {"thinker": "h:9"}, "dns:///aligner:50059")
    assert (added.outputs.words, added.stages["thinker"].address) == ("aligner", "h:9")
    assert added.stages["aligner"].address == "dns:///aligner:50059"
    file = tmp_path / "has.yaml"
    file.write_text(PIPELINE)
    with pytest.raises(YamlError, match=r"--aligner=h:3: .* has an aligner; give its address by --stage"):
        load_pipeline(file, aligner="h:3")
