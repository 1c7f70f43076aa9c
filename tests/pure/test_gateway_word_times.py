"""`timestamp_granularities[]=word` over HTTP, with a scripted thinker and a scripted aligner."""

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
from tests.support.systems.gateway import SPEECH, Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PIPELINE = """\
stages:
  thinker: {kind: thinker, address: 'h:1'}
  aligner: {kind: aligner, address: 'h:2'}
outputs: {text: thinker, words: aligner}
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


async def test_it_is_a_model_of_the_list(gateway):
    models = {model["id"]: model["quartet"] for model in (await gateway.http.get("/v1/models")).json()["data"]}
    facts = models["scripted-aligner"]
    assert (facts["output_modalities"], facts["languages"], facts["max_words"]) == (["words"], ["en", "de"], 100)


async def test_a_pipeline_without_an_aligner_says_what_would_help(speech_gateway):
    refused = await ask(speech_gateway, "word")
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "timestamp_granularities")
    assert "have the server started with --aligner-model, or leave word out" in error["message"]
    assert speech_gateway.scripts["thinker"].requests == []


def test_an_aligner_is_added_to_a_file_that_has_none(tmp_path):
    added = load_pipeline(SPEECH, {"thinker": "h:9"}, "dns:///aligner:50059")
    assert (added.outputs.words, added.stages["thinker"].address) == ("aligner", "h:9")
    assert added.stages["aligner"].address == "dns:///aligner:50059"
    file = tmp_path / "has.yaml"
    file.write_text(PIPELINE)
    with pytest.raises(YamlError, match=r"--aligner=h:3: .* has an aligner; give its address by --stage"):
        load_pipeline(file, aligner="h:3")
