"""Speech after token ids, over HTTP: the talker's codec frames and their sound; scripted stages."""

import asyncio
import base64
import io
import json
from typing import Any

import pytest
import soundfile

from services.common.errors import InvalidInput
from tests.support.scripted.code2wav import PCM16, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from tests.support.scripted.talker import CODES
from tests.support.systems.gateway import SPEECH, Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/inference/v1/generate"
IDS: dict[str, Any] = {"token_ids": [5, 6, 7]}
FACTS = {
    "code_groups": 2,
    "frames_per_second": SAMPLE_RATE_HZ / SAMPLES_PER_FRAME,
    "sample_rate_hz": SAMPLE_RATE_HZ,
}


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


async def generated(gateway: Running, speech: dict[str, Any], **members: Any) -> dict[str, Any]:
    response = await gateway.http.post(PATH, json=IDS | {"speech": speech} | members)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(gateway: Running, speech: dict[str, Any]) -> list[dict[str, Any]]:
    response = await gateway.http.post(PATH, json=IDS | {"speech": speech, "stream": True})
    *events, done = [line.removeprefix("data: ") for line in response.text.strip().split("\n\n")]
    assert (response.status_code, done) == (200, "[DONE]"), response.text
    return list(map(json.loads, events))


async def test_codes_come_without_sound(gateway: Running) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "max_frames": 7, "seed": 3}
    whole = await generated(gateway, {"voice": "Ethan", "sampling_params": sampling})
    (choice,) = whole["choices"]
    assert choice["speech"] == {"codes": CODES, "seed": 3, "finish_reason": "stop"}
    assert (choice["token_ids"], choice["finish_reason"], whole["speech"]) == ([0, 1, 2], "stop", FACTS)
    assert whole["usage"]["completion_tokens_details"] == {
        "text_tokens": 3,
        "audio_tokens": 3,
        "reasoning_tokens": 0,
    }
    assert whole["usage"]["completion_tokens"] == 6
    (start,) = gateway.scripts["talker"].requests
    assert (start.speaker, start.output_stream_id, start.source.stream_id != "") == ("ethan", "", True)
    assert (start.sampling.max_frames, start.sampling.seed, round(start.sampling.top_p, 3)) == (7, 3, 0.9)
    assert gateway.scripts["code2wav"].requests == []


async def test_sound_comes_beside_the_codes_that_it_is_made_of(gateway: Running) -> None:
    (choice,) = (await generated(gateway, {"audio": True}))["choices"]
    assert choice["speech"]["codes"] == CODES
    samples, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(choice["speech"]["audio"]["data"])), dtype="int16")
    assert (samples.tobytes(), rate_hz, choice["speech"]["audio"]["format"]) == (PCM16, SAMPLE_RATE_HZ, "wav")
    (start,) = gateway.scripts["talker"].requests
    assert (start.wants_frames, start.output_stream_id != "") == (True, True)
    (alone,) = (await generated(gateway, {"audio": True, "codes": False, "format": "pcm16"}))["choices"]
    assert base64.b64decode(alone["speech"]["audio"]["data"]) == PCM16
    assert "codes" not in alone["speech"]
    assert not gateway.scripts["talker"].requests[-1].wants_frames


async def test_codes_and_sound_come_in_pieces(gateway: Running) -> None:
    events = await streamed(gateway, {"audio": True, "sampling_params": {"seed": 9}})
    assert all(event["speech"] == FACTS for event in events)
    choices = [event["choices"][0] for event in events]
    told = [choice["speech"] for choice in choices if "speech" in choice]
    assert [piece["codes"] for piece in told if "codes" in piece] == [CODES[:2], CODES[2:]]
    sound = [piece["audio"] for piece in told if "audio" in piece]
    assert b"".join(base64.b64decode(piece["data"]) for piece in sound) == PCM16
    assert {piece["format"] for piece in sound} == {"pcm16"}
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == [0, 1, 2]
    assert choices[-1]["speech"] == {"seed": 9, "finish_reason": "stop"}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


async def test_each_answer_has_a_seed_that_is_told(gateway: Running) -> None:
    asked = await generated(gateway, {}, sampling_params={"n": 2, "seed": 5})
    assert [choice["speech"]["seed"] for choice in asked["choices"]] == [5, 6]
    assert sorted(start.sampling.seed for start in gateway.scripts["talker"].requests) == [5, 6]
    gateway.scripts["talker"].requests.clear()
    drawn = (await generated(gateway, {}))["choices"][0]["speech"]["seed"]
    assert [start.sampling.seed for start in gateway.scripts["talker"].requests] == [drawn]
    assert not gateway.scripts["thinker"].requests[-1].sampling.HasField("seed")


async def test_speech_is_given_up_with_its_text(gateway: Running) -> None:
    talker = gateway.scripts["talker"]
    talker.hold, talker.after = True, 2
    asking = asyncio.create_task(generated(gateway, {}, request_id="mine"))
    await talker.holding.wait()
    await asyncio.sleep(0)
    aborted = await gateway.http.post("/inference/v1/abort_requests", json={"request_ids": ["mine"]})
    assert aborted.status_code == 200
    (choice,) = (await asking)["choices"]
    assert (choice["finish_reason"], choice["speech"]["finish_reason"]) == ("abort", "abort")
    assert choice["speech"]["codes"] in ([], CODES[:2])
    await gateway.until(lambda: talker.ended == ["cancelled"])


async def test_a_client_that_leaves_ends_the_speech(gateway: Running) -> None:
    talker, code2wav = gateway.scripts["talker"], gateway.scripts["code2wav"]
    for script in (talker, code2wav):
        script.hold, script.after = True, 2
    asking = asyncio.create_task(generated(gateway, {"audio": True}))
    await talker.holding.wait()
    asking.cancel()
    await gateway.until(lambda: talker.ended == code2wav.ended == ["cancelled"])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"speech": {"voice": "nobody"}}, "speech.voice"),
    ({"speech": {"codes": False}}, "speech.codes"),
    ({"speech": {"format": "wav"}}, "speech.format"),
    ({"speech": {"audio": True, "format": "mp4"}}, "speech.format"),
    ({"speech": {"audio": True, "format": "mp3"}, "stream": True}, "speech.format"),
    ({"speech": {"logprobs": 1}}, "speech.logprobs"),
    ({"speech": {"codec": True}}, "speech.codec"),
    ({"speech": {"sampling_params": {"temperature": 3}}}, "speech.sampling_params.temperature"),
    ({"speech": {"sampling_params": {"max_frames": 0}}}, "speech.sampling_params.max_frames"),
    ({"speech": True}, "speech"),
]


@pytest.mark.parametrize(("members", "param"), BAD)
async def test_bad_input_is_named(gateway: Running, members: dict[str, Any], param: str) -> None:
    response = await gateway.http.post(PATH, json=IDS | members)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(f"{param}: ")
    assert gateway.scripts["thinker"].requests == []


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("token_ids", "token_ids"),
        ("speaker", "speech.voice"),
        ("sampling.predictor_top_k", "speech.sampling_params.predictor_top_k"),
    ],
)
async def test_refusals_of_the_talker_are_in_the_requests_words(gateway: Running, field: str, param: str) -> None:
    gateway.scripts["talker"].error = InvalidInput(field, "does not do")
    gateway.scripts["thinker"].hold = True  # so that the talker's word is the first
    refused = await gateway.http.post(PATH, json=IDS | {"speech": {}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert refused.json()["error"]["message"] == f"{param}: does not do"


async def test_a_server_without_speech_says_so() -> None:
    async with running(SPEECH.with_name("text.yaml")) as gateway:
        refused = await gateway.http.post(PATH, json=IDS | {"speech": {}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speech")
