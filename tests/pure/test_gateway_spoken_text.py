"""A talker that speaks what a thinker of another model writes, over HTTP."""

import asyncio
import base64
import json
import re

import pytest
import pytest_asyncio

from gateway.pipeline.config import load_pipeline
from gateway.pipeline.pipeline import Pipeline
from quartet.v1 import server_info_pb2, thinker_pb2
from services.common.errors import InternalError
from tests.support.clock import until
from tests.support.scripted.code2wav import PCM16
from tests.support.scripted.stages import scripted_stages
from tests.support.scripted.talker import VOICES
from tests.support.systems.gateway import HEALTH_TIMEOUT_S, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PIPELINE = """\
stages:
  thinker: {kind: thinker, address: 'h:1'}
  talker: {kind: talker, address: 'h:2', source: thinker, reads: text}
  code2wav: {kind: code2wav, address: 'h:3', source: talker}
outputs: {text: thinker, speech: code2wav}
"""
ASK = {"messages": [{"role": "user", "content": "Hi"}], "modalities": ["text", "audio"]}
MARKED = ("## Boats\n", "The **red", "** one ", "is [here](http://a.b", ").\n", "```\nx = 1\n", "```\n", "Go 🎉 on.")
SAID = "Boats\nThe red one is here.\nGo on."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory):
    file = tmp_path_factory.mktemp("cascade") / "cascade.yaml"
    file.write_text(PIPELINE)
    async with running(file) as gateway:
        gateway.stages.infos["talker"].info.model = "a-voice"
        await gateway.publish_info("talker")
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(started):
    yield started
    await started.reset()


def spoken(gateway) -> str:
    script = gateway.scripts["talker"]
    return "".join([*(request.text.text for request in script.requests), *script.typed])


async def test_what_is_for_the_ear_is_spoken_and_all_is_written(gateway):
    gateway.scripts["thinker"].pieces = MARKED
    gateway.scripts["thinker"].thought = ("Hm, ", "boats.")
    body = (await gateway.chat(ASK | {"audio": {"voice": VOICES[1], "format": "pcm16"}, "seed": 7})).json()
    message = body["choices"][0]["message"]
    assert message["audio"]["transcript"] == "".join(MARKED)
    assert base64.b64decode(message["audio"]["data"]) == PCM16
    assert spoken(gateway) == SAID
    (speak,) = gateway.scripts["talker"].requests
    assert (speak.speaker, speak.sampling.seed, speak.WhichOneof("input")) == (VOICES[1], 7, "text")
    assert speak.text.whole_text_first is False
    assert speak.text.HasField("whole_text_first")
    (generate,) = gateway.scripts["thinker"].requests
    assert not generate.output_stream_id
    (decode,) = gateway.scripts["code2wav"].requests
    assert decode.source.stream_id == speak.output_stream_id
    assert decode.source.address == gateway.stages.addresses["talker"]
    assert body["usage"]["completion_tokens_details"]["audio_tokens"] == 3
    assert set(body["quartet"]["timings"]) == {"thinker", "talker", "code2wav"}


async def test_it_is_spoken_before_the_tenth_token_is_written(gateway):
    script = gateway.scripts["thinker"]
    script.pieces = [f"word{i} " for i in range(12)]
    script.hold, script.after = True, 10  # the prompt, and nine tokens
    request = gateway.http.stream("POST", "/v1/chat/completions", json=ASK | {"stream": True})
    async with asyncio.timeout(60), request as response:
        lines = response.aiter_lines()
        async for line in lines:
            if line.startswith("data: {") and json.loads(line[6:]).get("modality") == "audio":
                break
        assert script.holding.is_set()
        async with asyncio.timeout(60):
            while len(gateway.scripts["talker"].typed) < 9:
                await asyncio.sleep(0.005)
        script.go_on()
        rest = [line async for line in lines]
    assert "data: [DONE]" in rest
    assert spoken(gateway) == "".join(script.pieces).rstrip() + " "


async def test_what_is_only_text_asks_nobody_to_speak(gateway):
    body = (await gateway.chat(ASK | {"modalities": ["text"]})).json()
    assert body["choices"][0]["message"]["content"] == "Hello, world"
    assert gateway.scripts["talker"].requests == gateway.scripts["code2wav"].requests == []


@pytest.mark.parametrize("pieces", [("...", " ", "!"), ("```\n", "x = 1\n", "```"), ("🎉",)])
async def test_nothing_to_say_is_no_text_for_the_talker(gateway, pieces):
    gateway.scripts["thinker"].pieces = pieces
    body = (await gateway.chat(ASK)).json()
    assert body["choices"][0]["message"]["audio"]["transcript"] == "".join(pieces)
    assert spoken(gateway) == ""


async def test_a_call_of_a_function_is_not_spoken(gateway):
    gateway.scripts["thinker"].tool_call = True
    tools = [{"type": "function", "function": {"name": "lamp"}}]
    body = (await gateway.chat(ASK | {"tools": tools})).json()
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert spoken(gateway) == ""


@pytest.mark.parametrize("stage", ["talker", "code2wav"])
async def test_a_stage_that_fails_ends_the_answer(gateway, stage):
    gateway.scripts[stage].error, gateway.scripts[stage].after = InternalError("broken"), 1
    gateway.scripts["thinker"].hold, gateway.scripts["thinker"].after = True, 2
    status, error = await gateway.refusal(ASK)
    assert (status, error["code"]) == (500, "internal_error")
    assert stage in error["message"]
    await gateway.until(lambda: not any(script.running for script in gateway.scripts.values()))
    assert gateway.scripts["thinker"].ended == ["cancelled"]
    gateway.scripts[stage].error = None
    gateway.scripts["thinker"].go_on()
    assert (await gateway.chat(ASK)).status_code == 200


async def test_who_leaves_ends_the_speech(gateway):
    gateway.scripts["thinker"].hold, gateway.scripts["thinker"].after = True, 2
    asking = asyncio.create_task(gateway.chat(ASK))
    await gateway.until(lambda: gateway.scripts["talker"].running and gateway.scripts["thinker"].holding.is_set())
    asking.cancel()
    await gateway.until(lambda: not any(script.running for script in gateway.scripts.values()))


async def test_each_answer_is_spoken(gateway):
    body = (await gateway.chat(ASK | {"n": 2, "seed": 3})).json()
    assert [choice["message"]["audio"]["transcript"] for choice in body["choices"]] == ["Hello, world"] * 2
    assert sorted(request.sampling.seed for request in gateway.scripts["talker"].requests) == [3, 4]


async def test_a_voice_that_it_has_not_is_refused(gateway):
    status, error = await gateway.refusal(ASK | {"audio": {"voice": "nobody"}})
    assert (status, error["param"]) == (400, "audio.voice")
    assert gateway.scripts["thinker"].requests == []


async def test_both_models_have_names(gateway):
    models = {each["id"]: each["quartet"] for each in (await gateway.http.get("/v1/models")).json()["data"]}
    assert list(models) == ["scripted", "a-voice"]
    assert models["scripted"]["output_modalities"] == ["text", "audio"]
    assert models["scripted"]["voices"] == models["a-voice"]["voices"] == VOICES
    assert (models["a-voice"]["input_modalities"], models["a-voice"]["output_modalities"]) == (["text"], ["audio"])
    assert models["a-voice"]["max_context_tokens"] is None
    for name in ("a-voice", "tts-1"):
        said = {"model": name, "input": "Hello, sea.", "voice": "alloy", "response_format": "pcm"}
        assert (await gateway.http.post("/v1/audio/speech", json=said)).content == PCM16
    assert [request.text.text for request in gateway.scripts["talker"].requests] == ["Hello, sea."] * 2
    assert gateway.scripts["thinker"].requests == []
    status, error = await gateway.refusal(ASK | {"model": "a-voice"})
    assert (status, error["param"]) == (400, "model")


async def test_a_raw_prompt_is_spoken_too(gateway):
    body = {"token_ids": [1, 2], "speech": {"audio": True, "sampling_params": {"seed": 5}}, "sampling_params": {}}
    choice = (await gateway.http.post("/inference/v1/generate", json=body)).json()["choices"][0]
    assert choice["speech"]["codes"] == [[1, 2], [3, 4], [5, 6]]
    assert choice["speech"]["seed"] == 5
    assert spoken(gateway) == "Hello, world"


@pytest_asyncio.fixture(loop_scope="module")
async def short(tmp_path):
    """Its talker makes 10 s at a time."""
    file = tmp_path / "cascade.yaml"
    file.write_text(PIPELINE)
    talker = server_info_pb2.TalkerInfo(speakers=VOICES, max_context_positions=4096, reads_text=True, max_frames=125)
    async with running(file, talker) as gateway:
        yield gateway


async def test_a_long_answer_is_spoken_sentence_after_sentence(short):
    sentences = [f"This is sentence number {i}, and a long one. " for i in range(12)]
    short.scripts["thinker"].pieces = re.findall(r"\S+| ", "".join(sentences))
    body = (await short.chat(ASK | {"audio": {"format": "pcm16"}})).json()
    utterances = [request.request_id for request in short.scripts["talker"].requests]
    assert len(utterances) > 3
    assert len(set(utterances)) == len(utterances)
    assert spoken(short) == "".join(sentences).rstrip() + " "
    assert base64.b64decode(body["choices"][0]["message"]["audio"]["data"]) == PCM16 * len(utterances)
    assert body["usage"]["completion_tokens_details"]["audio_tokens"] == 3 * len(utterances)
    assert len(short.scripts["thinker"].requests) == 1


async def test_the_most_frames_of_a_request_are_of_all_utterances(short):
    short.scripts["thinker"].pieces = ["This is a sentence, and a long one. "] * 12
    assert (await short.chat(ASK | {"quartet": {"talker": {"max_frames": 7}}})).status_code == 200
    assert [request.sampling.max_frames for request in short.scripts["talker"].requests] == [7, 4, 1]


async def test_a_talker_that_reads_no_text_is_refused(tmp_path):
    file = tmp_path / "cascade.yaml"
    file.write_text(PIPELINE)
    async with scripted_stages() as stages:
        stages.infos["talker"].info.talker.reads_text = False
        async with Pipeline(load_pipeline(file, stages.addresses), timeout_s=HEALTH_TIMEOUT_S) as pipeline:
            talker = pipeline.by_name["talker"]
            await until(lambda: talker.is_settled)
            assert not talker.serving
            assert "start a talker that reads text" in talker.state


async def test_deltas_that_come_first_are_spoken_too(gateway):
    """After the first answer, deltas come by a stream of their own."""
    for _ in range(3):
        assert (await gateway.chat(ASK)).status_code == 200
    assert spoken(gateway) == "Hello, world" * 3
    assert any(request.deltas_to.stream_id for request in gateway.scripts["thinker"].requests)
    assert isinstance(gateway.scripts["thinker"].requests[0], thinker_pb2.GenerateStart)
