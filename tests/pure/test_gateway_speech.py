"""`POST /v1/audio/speech` over HTTP, with scripted stages."""

import asyncio
import base64
import io
import json
import math

import av
import httpx
import numpy as np
import pytest
import soundfile

from gateway.pipeline.sentences import cut
from quartet.v1 import talker_pb2
from services.common.errors import InternalError, InvalidInput, QueueFull, Unavailable
from tests.support.scripted.code2wav import PCM16, SAMPLE_RATE_HZ
from tests.support.scripted.talker import VOICES
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/audio/speech"
TEXT = "Good morning. The boats are out."
ASK = {"model": "scripted", "input": TEXT}
SAMPLES = np.frombuffer(PCM16, "<i2")


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


async def post(gateway: Running, **members: object) -> httpx.Response:
    return await gateway.http.post(PATH, json=ASK | members)


async def test_a_text_is_spoken_by_the_talker_alone(gateway):
    voice = {"id": VOICES[1].upper()}
    quartet = {"talker": {"max_frames": 9}}
    response = await post(gateway, voice=voice, seed=5, instructions="Calmly.", response_format="pcm", quartet=quartet)
    assert (response.status_code, response.content) == (200, PCM16)
    assert response.headers["content-type"] == "audio/pcm"
    assert response.headers["x-quartet-sample-rate-hz"] == str(SAMPLE_RATE_HZ)
    (start,) = gateway.scripts["talker"].requests
    assert start.text == talker_pb2.SpokenText(text=TEXT, instructions="Calmly.")
    assert (start.speaker, start.sampling.seed, start.sampling.max_frames) == (VOICES[1], 5, 9)
    assert not gateway.scripts["thinker"].requests
    (decode,) = gateway.scripts["code2wav"].requests
    assert decode.source.stream_id == start.output_stream_id


async def test_what_a_benchmarks_client_sends(gateway):
    """`vllm bench serve --omni --backend openai-audio-speech` with random texts."""
    sent = {"stream": True, "stream_format": "audio", "response_format": "pcm", "ignore_eos": True}
    response = await post(gateway, **sent)
    assert (response.status_code, response.content) == (200, PCM16)


@pytest.mark.parametrize("file_format", ["wav", "flac"])
async def test_lossless_formats(gateway, file_format):
    response = await post(gateway, response_format=file_format)
    assert response.headers["content-type"] == f"audio/{file_format}"
    with av.open(io.BytesIO(response.content)) as container:  # its header cannot say how long it is
        frames = list(container.decode(audio=0))  # pyright: ignore[reportAttributeAccessIssue]
    assert {(frame.format.name, frame.sample_rate) for frame in frames} == {("s16", SAMPLE_RATE_HZ)}
    np.testing.assert_array_equal(np.concatenate([frame.to_ndarray()[0] for frame in frames]), SAMPLES)


@pytest.mark.parametrize(
    ("file_format", "kind", "codec"),
    [(None, "mpeg", "mp3float"), ("mp3", "mpeg", "mp3float"), ("opus", "ogg", "opus"), ("aac", "aac", "aac")],
)
async def test_lossy_formats(gateway, file_format, kind, codec):
    response = await post(gateway, **({"response_format": file_format} if file_format else {}))
    assert response.headers["content-type"] == f"audio/{kind}"
    with av.open(io.BytesIO(response.content)) as container:
        assert container.streams.audio[0].codec_context.name == codec
        heard_s = sum(f.samples / f.sample_rate for f in container.decode(audio=0))  # pyright: ignore[reportAttributeAccessIssue]
    assert heard_s == pytest.approx(len(SAMPLES) / SAMPLE_RATE_HZ, abs=0.15)  # lossy codecs pad


@pytest.mark.parametrize("file_format", ["pcm", "wav", "flac", "mp3", "opus"])
async def test_the_first_bytes_leave_after_one_frame(gateway, file_format):
    script = gateway.scripts["code2wav"]
    script.hold, script.after = True, 1
    asked = gateway.http.build_request("POST", PATH, json=ASK | {"response_format": file_format})
    response = await gateway.http.send(asked, stream=True)
    pieces = response.aiter_raw()
    assert await anext(pieces)
    assert script.holding.is_set()
    script.go_on()
    assert [piece async for piece in pieces]


@pytest.mark.parametrize("speed", [0.25, 0.7, 2.0, 4.0])
async def test_speed_changes_the_time_and_not_the_pitch(gateway, monkeypatch, speed):
    tone = np.rint(9000 * np.sin(2 * np.pi * 440 * np.arange(2 * SAMPLE_RATE_HZ) / SAMPLE_RATE_HZ)).astype("<i2")
    monkeypatch.setattr("tests.support.scripted.code2wav.PCM16", tone.tobytes())
    response = await post(gateway, speed=speed, response_format="wav")
    samples, _ = soundfile.read(io.BytesIO(response.content), dtype="float32")
    assert len(samples) == pytest.approx(len(tone) / speed, rel=0.1)
    middle = samples[len(samples) // 4 : -len(samples) // 4]
    loudest_hz = np.abs(np.fft.rfft(middle)).argmax() * SAMPLE_RATE_HZ / len(middle)
    assert loudest_hz == pytest.approx(440, rel=0.02)


async def test_events(gateway):
    response = await post(gateway, response_format="pcm", stream_format="sse")
    assert response.headers["content-type"].startswith("text/event-stream")
    *deltas, done = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(event["audio"]) for event in deltas) == PCM16
    usage = {"input_tokens": 4, "output_tokens": 3, "total_tokens": 7}
    assert done == {"type": "speech.audio.done", "usage": usage}


async def test_openai_s_client(gateway):
    speech = gateway.openai.audio.speech.with_streaming_response
    async with speech.create(model="scripted", voice="ethan", input=TEXT, response_format="pcm") as response:
        assert b"".join([piece async for piece in response.iter_bytes()]) == PCM16


async def test_long_text_is_spoken_in_pieces_with_one_voice(gateway):
    """Each no longer than what the talker says, however slowly, before it ends by itself."""
    talker, code2wav = (gateway.app.state.gateway.pipeline.info(stage) for stage in ("talker", "code2wav"))
    talker.max_frames = math.ceil(20 * 0.12 * code2wav.sample_rate_hz / code2wav.samples_per_frame)
    text = "One sentence. And a second one! A third, which is long by itself? Four."
    try:
        response = await post(gateway, input=text, response_format="pcm", seed=3, voice="ethan")
    finally:
        talker.ClearField("max_frames")
    starts = gateway.scripts["talker"].requests
    assert [start.text.text for start in starts] == cut(text, 20)
    assert response.content == PCM16 * len(starts)
    assert {(start.speaker, start.sampling.seed) for start in starts} == {("ethan", 3)}
    assert len({start.request_id for start in starts}) == len(starts) > 3


BAD = {
    "another model": ({"model": "gpt"}, 404, "model"),
    "no text": ({"input": ""}, 400, "input"),
    "white space": ({"input": " \n"}, 400, "input"),
    "nothing to say": ({"input": "?! ... \N{GRINNING FACE}"}, 400, "input"),
    "text too long": ({"input": "a" * 50_001}, 400, "input"),
    "text no text": ({"input": ["a"]}, 400, "input"),
    "unknown voice": ({"voice": "bob"}, 400, "voice"),
    "unknown voice id": ({"voice": {"id": "bob"}}, 400, "voice"),
    "voice no text": ({"voice": 5}, 400, "voice"),
    "voice without id": ({"voice": {"name": "ethan"}}, 400, "voice.name"),
    "too fast": ({"speed": 4.1}, 400, "speed"),
    "too slow": ({"speed": 0.2}, 400, "speed"),
    "speed no number": ({"speed": "fast"}, 400, "speed"),
    "unknown format": ({"response_format": "ogg"}, 400, "response_format"),
    "unknown stream format": ({"stream_format": "ndjson"}, 400, "stream_format"),
    "instructions no text": ({"instructions": 1}, 400, "instructions"),
    "seed below 0": ({"seed": -1}, 400, "seed"),
    "unknown member": ({"loudness": 2}, 400, "loudness"),
    "no frames": ({"quartet": {"talker": {"max_frames": 0}}}, 400, "quartet.talker.max_frames"),
    "unknown setting": ({"quartet": {"thinker": {}}}, 400, "quartet.thinker"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_names_the_member(gateway, case):
    members, status, param = BAD[case]
    response = await post(gateway, **members)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert error["type"] == "invalid_request_error"
    assert not gateway.scripts["talker"].requests


async def test_bad_input_disturbs_nobody(gateway):
    script = gateway.scripts["code2wav"]
    script.hold, script.after = True, 1
    good = asyncio.create_task(post(gateway, response_format="pcm"))
    await script.holding.wait()
    refused = await asyncio.gather(*(post(gateway, **members) for members, _, _ in BAD.values()))
    assert {response.status_code for response in refused} == {400, 404}
    script.go_on()
    assert (await good).content == PCM16
    assert len(gateway.scripts["talker"].requests) == 1


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidInput("speaker", "no"), 400, "voice"),
        (InvalidInput("text", "no"), 400, "input"),
        (InvalidInput("text.instructions", "no"), 400, "instructions"),
        (InvalidInput("sampling.top_k", "no"), 400, "quartet.talker.top_k"),
        (QueueFull("full"), 429, None),
        (Unavailable("draining"), 503, None),
        (InternalError("broken"), 500, None),
    ],
)
async def test_errors_of_the_stage(gateway, error, status, param):
    gateway.scripts["talker"].error = error
    response = await post(gateway)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_an_error_after_the_first_bytes_cuts_the_body_short(gateway):
    script = gateway.scripts["code2wav"]
    script.error, script.after = InternalError("broken"), 1

    async def read(**members: str) -> str:
        script.hold, text = True, ""
        script.release.clear()
        async with gateway.http.stream("POST", PATH, json=ASK | {"response_format": "pcm"} | members) as response:
            async for piece in response.aiter_bytes():
                script.go_on()  # a failure overtakes what no client has read
                text += piece.decode(errors="replace")
        return text

    with pytest.raises(httpx.RemoteProtocolError):
        await read()
    *_, last = [json.loads(line[6:]) for line in (await read(stream_format="sse")).split("\n\n") if line]
    assert last["error"]["code"] == "internal_error"


async def test_a_client_that_leaves_ends_all_stages_work(gateway):
    for kind in ("talker", "code2wav"):
        gateway.scripts[kind].hold, gateway.scripts[kind].after = True, 1
    asking = asyncio.create_task(post(gateway))
    await asyncio.gather(*(gateway.scripts[kind].holding.wait() for kind in ("talker", "code2wav")))
    asking.cancel()
    await gateway.until(lambda: all(gateway.scripts[kind].ended == ["cancelled"] for kind in ("talker", "code2wav")))
    for kind in ("talker", "code2wav"):
        gateway.scripts[kind].go_on()
    assert (await post(gateway, response_format="pcm")).content == PCM16


async def test_voices(gateway):
    body = (await gateway.http.get("/v1/audio/voices")).json()
    assert [voice["name"] for voice in body["voices"]] == VOICES
    assert [(voice["id"], voice["default"]) for voice in body["data"]] == [(VOICES[0], True), (VOICES[1], False)]
    (model,) = (await gateway.http.get("/v1/models")).json()["data"]
    assert model["quartet"]["max_speech_characters"] == 50_000


async def test_instructions_that_leave_no_room_are_refused(gateway):
    response = await post(gateway, instructions="Softly. " * 100_000)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "instructions"
