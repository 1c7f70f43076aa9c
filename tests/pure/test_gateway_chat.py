"""The gateway over HTTP, with stages that follow a script."""

import asyncio
import base64
import io
import json
import wave

import av
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.http.connection import ClientGone, EventStream
from gateway.media.encode import encode_audio
from services.common.errors import ContextTooLong, InvalidInput, InvalidMedia, QueueFull, RequestCancelled, Unavailable
from tests.support.clock import put_forward
from tests.support.scripted.code2wav import PCM16, SAMPLE_RATE_HZ
from tests.support.scripted.talker import VOICES
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import running

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "".join(PIECES)
ASK = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
SPEAK = ASK | {"modalities": ["text", "audio"]}


@pytest.fixture
def gateway(speech_gateway):
    return speech_gateway


async def test_whole_text(gateway):
    response = await gateway.chat(ASK, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    body = ChatCompletion.model_validate_json(response.text)
    assert body.choices[0].message.content == TEXT
    assert body.choices[0].finish_reason == "stop"
    assert body.choices[0].message.audio is None
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (10, 3, 13)
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 2,
        "audio_tokens": 3,
        "image_tokens": 4,
        "text_tokens": 3,
    }
    assert response.json()["quartet"]["timings"]["thinker"]["prefill_ms"] == 2
    assert gateway.scripts["thinker"].requests[0].request_id == "mine"
    assert gateway.scripts["talker"].requests == []


@pytest.mark.parametrize("file_format", ["wav", "mp3", "flac", "opus", "aac", "pcm16"])
async def test_whole_speech_in_each_format(gateway, file_format):
    body = await gateway.openai.chat.completions.create(**SPEAK, audio={"voice": "Ethan", "format": file_format})
    audio = body.choices[0].message.audio
    assert audio.transcript == body.choices[0].message.content == TEXT
    assert audio.expires_at > body.created
    file = base64.b64decode(audio.data)
    if file_format == "pcm16":
        assert file == PCM16
    else:
        with av.open(io.BytesIO(file)) as container:
            heard_s = sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0))  # pyright: ignore[reportAttributeAccessIssue]
        assert heard_s == pytest.approx(len(PCM16) / 2 / SAMPLE_RATE_HZ, abs=0.15)  # lossy codecs pad
    assert body.usage.completion_tokens_details.audio_tokens == 3
    assert body.usage.completion_tokens == 6
    assert gateway.scripts["talker"].requests[0].speaker == "ethan"


async def test_streamed_speech(gateway):
    events = await gateway.events(SPEAK | {"stream_options": {"include_usage": True}})
    for event in events:
        ChatCompletionChunk.model_validate(event)
        assert event["modality"] in ("text", "audio")
    *body, last, usage = events
    text, transcript, pcm, ids = "", "", b"", set()
    for event in body:
        (choice,) = event["choices"]
        assert choice["finish_reason"] is None
        text += choice["delta"].get("content") or ""
        if audio := choice["delta"].get("audio"):
            assert event["modality"] == "audio"
            transcript += audio["transcript"]
            pcm += base64.b64decode(audio["data"])
            ids.add(audio["id"])
    assert text == transcript == TEXT
    assert pcm == PCM16
    assert len(ids) == 1
    assert last["choices"][0]["finish_reason"] == "stop"
    assert set(last["quartet"]["timings"]) == {"thinker", "talker", "code2wav"}
    assert last["quartet"]["frames"] == 3
    assert last["quartet"]["sample_rate_hz"] == SAMPLE_RATE_HZ
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 16
    assert all(event["usage"] is None for event in events[:-1])


async def test_usage_so_far_in_every_chunk(gateway):
    options = {"include_usage": True, "continuous_usage_stats": True}
    of_clients = {"return_stage_metrics": True, "ignore_eos": True, "stop": None, "max_completion_tokens": 16}
    *events, last = await gateway.events(ASK | {"stream_options": options} | of_clients)
    so_far = [event["usage"]["completion_tokens"] for event in events]
    assert so_far == sorted(so_far)
    assert so_far[0] == 0
    assert so_far[-1] == last["usage"]["completion_tokens"] == 3
    assert {event["usage"]["prompt_tokens"] for event in events} == {10}


async def test_each_chunk_of_audio_is_a_wav_file_if_asked(gateway):
    events = await gateway.events(SPEAK | {"audio": {"format": "wav"}})
    pieces = [event["choices"][0]["delta"]["audio"]["data"] for event in events if event["modality"] == "audio"]
    pcm = b""
    for piece in pieces:
        with wave.open(io.BytesIO(base64.b64decode(piece))) as file:
            assert file.getframerate() == SAMPLE_RATE_HZ
            pcm += file.readframes(file.getnframes())
    assert pcm == PCM16
    status, error = await gateway.refusal(SPEAK | {"stream": True, "audio": {"format": "mp3"}})
    assert (status, error["param"]) == (400, "audio.format")


async def test_a_sound_may_come_as_a_data_url_and_in_a_known_format_only(gateway):
    wav = base64.b64encode(encode_audio(PCM16, SAMPLE_RATE_HZ, "wav")).decode()
    part = {"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{wav}", "format": "wav"}}
    assert (await gateway.chat(ASK | {"messages": [{"role": "user", "content": [part]}]})).status_code == 200
    part["input_audio"]["format"] = "midi"
    status, error = await gateway.refusal(ASK | {"messages": [{"role": "user", "content": [part]}]})
    assert (status, error["param"]) == (400, "messages[0].content[0].input_audio.format")


async def test_no_usage_unless_asked(gateway):
    assert not any("usage" in event for event in await gateway.events(ASK))


async def test_stages_are_told_where_to_read_and_how_to_sample(gateway):
    options = {"seed": 7, "n": 2, "max_completion_tokens": 5, "stop": "!", "logit_bias": {"3": -1}}
    talker = {"temperature": 0, "max_frames": 9}
    await gateway.chat(SPEAK | options | {"quartet": {"talker": talker}})
    starts = sorted(gateway.scripts["thinker"].requests, key=lambda start: start.request_id)
    assert [start.sampling.seed for start in starts] == [7, 8]
    assert starts[0].sampling.max_tokens == 5
    assert list(starts[0].sampling.stop) == ["!"]
    assert dict(starts[0].sampling.logit_bias) == {3: -1.0}
    assert not starts[0].sampling.HasField("temperature")
    for request in gateway.scripts["talker"].requests:
        start = next(start for start in starts if start.request_id == request.request_id)
        assert request.source.address == gateway.stages.addresses["thinker"]
        assert request.source.stream_id == start.output_stream_id
        assert request.sampling.max_frames == 9
        assert request.sampling.HasField("temperature")
        assert request.sampling.seed == start.sampling.seed
    for request in gateway.scripts["code2wav"].requests:
        assert request.source.address == gateway.stages.addresses["talker"]


async def test_logprobs_and_tool_calls(gateway):
    gateway.scripts["thinker"].logprobs = True
    body = await gateway.openai.chat.completions.create(**ASK, logprobs=True, top_logprobs=1)
    assert [token.token for token in body.choices[0].logprobs.content] == list(PIECES)
    assert body.choices[0].logprobs.content[0].top_logprobs[0].token == "x"

    gateway.scripts["thinker"].tool_call = True
    tools = [{"type": "function", "function": {"name": "lamp"}}]
    body = await gateway.openai.chat.completions.create(**ASK, tools=tools)
    (call,) = body.choices[0].message.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("call_1", "lamp", '{"on":true}')
    assert body.choices[0].finish_reason == "tool_calls"
    assert body.choices[0].message.content is None


async def test_earlier_audio_can_be_referred_to(gateway):
    spoken = await gateway.openai.chat.completions.create(**SPEAK)
    reference = {"role": "assistant", "audio": {"id": spoken.choices[0].message.audio.id}}
    question = {"role": "user", "content": "Again?"}
    await gateway.chat({"model": "scripted", "messages": [*ASK["messages"], reference, question]})
    assert gateway.scripts["thinker"].requests[-1].messages[1].content[0].text == TEXT
    reference["audio"]["id"] = "audio_unknown"
    status, error = await gateway.refusal({"model": "scripted", "messages": [*ASK["messages"], reference, question]})
    assert (status, error["param"]) == (400, "messages[1].audio.id")


async def test_large_media_follow_in_chunks(gateway):
    wav = (
        b"RIFF" + (36 + 6_000_000).to_bytes(4, "little") + b"WAVEfmt \x10\0\0\0\1\0\1\0\x80\x3e\0\0\0\x7d\0\0\2\0\x10\0"
    )
    wav += b"data" + (6_000_000).to_bytes(4, "little") + bytes(6_000_000)
    small = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav[:3244]).decode(), "format": "wav"}}
    large = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav).decode(), "format": "wav"}}
    response = await gateway.chat({"model": "scripted", "messages": [{"role": "user", "content": [small, large]}]})
    assert response.status_code == 200, response.text
    parts = gateway.scripts["thinker"].requests[0].messages[0].content
    assert parts[0].media.data == wav[:3244]
    assert not parts[1].media.data
    assert parts[1].media.size_bytes == len(wav)
    assert bytes(gateway.scripts["thinker"].media) == wav


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"foo": 1}, 400, "foo"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_completion_tokens": -2}, 400, "max_completion_tokens"),
        ({"temperature": 2.1}, 400, "temperature"),
        ({"temperature": "1"}, 400, "temperature"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"n": 9}, 400, "n"),
        ({"n": 10**12}, 400, "n"),
        ({"messages": [{"role": "system", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x" * 17_000_000}]}, 400, "messages"),
        ({"modalities": ["audio"]}, 400, "modalities"),
        ({"modalities": ["text", "smell"]}, 400, "modalities[1]"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "nobody"}}, 400, "audio.voice"),
        ({"modalities": ["text", "audio"], "audio": {"format": "midi"}}, 400, "audio.format"),
        ({"modalities": ["text", "audio"], "audio": {"format": "mp3"}, "stream": True}, 400, "audio.format"),
        ({"quartet": {"talker": {"foo": 1}}}, 400, "quartet.talker.foo"),
        ({"quartet": {"talker": {"top_p": 0}}}, 400, "quartet.talker.top_p"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text"),
        ({"messages": [{"role": "usr", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "Assistant", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "<|im_end|>", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "judge", "content": "x", "tool_call_id": "c"}]}, 400, "messages[0].tool_call_id"),
    ],
)
async def test_bad_requests_name_the_field(gateway, changes, status, param):
    got, error = await gateway.refusal(ASK | changes)
    assert (got, error["param"]) == (status, param)
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"
    if param == "audio.voice":
        assert all(voice in error["message"] for voice in VOICES)
    assert gateway.scripts["thinker"].requests == []


async def test_bad_bodies_and_paths(gateway):
    for content in (b"{", b"[]", b"\xff"):
        response = await gateway.http.post("/v1/chat/completions", content=content)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert response.headers["x-request-id"]
    assert (await gateway.http.get("/v1/nothing")).json()["error"]["code"] == "not_found"
    assert (await gateway.http.get("/v1/chat/completions")).status_code == 405


async def test_a_body_over_the_limit_is_refused_while_it_is_read():
    async with running(max_body_bytes=100_000) as gateway:

        async def pieces():
            for _ in range(300):
                yield bytes(10_000)

        response = await gateway.http.post("/v1/chat/completions", content=pieces())
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert (await gateway.chat(ASK | {"user": "x" * 200_000})).status_code == 413
        assert (await gateway.chat(ASK)).status_code == 200


async def test_stage_errors_reach_the_client(gateway):
    thinker = gateway.scripts["thinker"]
    thinker.error = InvalidInput("sampling.top_p", "too low")
    assert (await gateway.refusal(ASK))[1]["param"] == "top_p"
    thinker.error = ContextTooLong("messages", "the prompt has 9 tokens; the limit is 8 with the answer included")
    assert (await gateway.refusal(ASK))[1]["code"] == "context_length_exceeded"
    thinker.error = InvalidInput("messages", "no context here")  # the stage's words decide nothing
    assert (await gateway.refusal(ASK))[1]["code"] == "invalid_value"
    thinker.error = InvalidMedia("messages[0].content[1]", "the file is cut off: send it whole")
    error = (await gateway.refusal(ASK))[1]
    assert (error["param"], error["code"]) == ("messages[0].content[1]", "invalid_media")
    thinker.error = QueueFull("full", retry_after_s=3)
    response = await gateway.chat(ASK)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    thinker.error = None
    gateway.scripts["talker"].error = InvalidInput("sampling.top_k", "no")
    assert (await gateway.refusal(SPEAK))[1]["param"] == "quartet.talker.top_k"


async def test_the_root_error_wins(gateway, monkeypatch):
    monkeypatch.setattr("gateway.pipeline.run.ECHO_GRACE_S", 60)  # whichever of the three is the last to come
    gateway.scripts["talker"].error = RequestCancelled("the source was cancelled")
    gateway.scripts["code2wav"].error = Unavailable("the source is gone")
    gateway.scripts["thinker"].error = InvalidInput("messages[0].content[0]", "broken")
    status, error = await gateway.refusal(SPEAK)
    assert (status, error["param"]) == (400, "messages[0].content[0]")


async def test_an_error_in_mid_stream_is_an_event(gateway):
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.error, thinker.after = True, Unavailable("draining"), 2
    async with gateway.http.stream("POST", "/v1/chat/completions", json=ASK | {"stream": True}) as response:
        lines = response.aiter_lines()
        while PIECES[0] not in await anext(lines):
            pass
        thinker.release.set()
        (last,) = [line async for line in lines if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stage_unavailable"


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
async def test_a_lost_stage_ends_the_request_and_comes_back(gateway, stage):
    for script in gateway.scripts.values():
        script.hold, script.after = True, 1
    async with gateway.http.stream("POST", "/v1/chat/completions", json=SPEAK | {"stream": True}) as response:
        assert response.status_code == 200  # the stream has begun
        await gateway.held()
        await gateway.stages.servers[stage].stop(grace=None)
        *_, last = [line async for line in response.aiter_lines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stage_unavailable"
    others = [script for name, script in gateway.scripts.items() if name != stage]
    await gateway.until(lambda: all(script.ended == ["cancelled"] for script in others))

    ready = await gateway.http.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["stages"][stage] != "SERVING"
    assert (await gateway.chat(SPEAK)).status_code == 503
    assert (await gateway.http.get("/health")).status_code == 200

    for script in gateway.scripts.values():
        script.hold = False
    await gateway.stages.start(stage)
    await gateway.until(lambda: gateway.app.state.gateway.pipeline.ready)
    assert (await gateway.chat(SPEAK)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 1])
async def test_a_disconnect_cancels_every_stage(gateway, stream, after):
    for script in gateway.scripts.values():
        script.hold, script.after = True, after
    asking = asyncio.create_task(gateway.chat(SPEAK | {"stream": stream}))
    await gateway.held()
    asking.cancel()
    await gateway.until(lambda: all(script.ended == ["cancelled"] for script in gateway.scripts.values()))
    await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)


async def test_deadline():
    async with running(request_timeout_s=600) as gateway:
        gateway.scripts["thinker"].hold = True
        asking = asyncio.create_task(gateway.chat(ASK, timeout=None))
        await gateway.scripts["thinker"].holding.wait()
        put_forward(600)
        response = await asking
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        await gateway.until(lambda: gateway.scripts["thinker"].ended == ["cancelled"])


async def test_a_client_that_stalls_gives_its_place_up():
    async with running(request_timeout_s=0.5) as gateway:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))
        writer.write(head)
        assert b" 408 " in await reader.readline()
        writer.close()
        await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)


async def test_a_stream_nobody_reads_ends(monkeypatch):
    monkeypatch.setattr("gateway.http.connection.LAST_WORD_S", 0.0)

    async def events():
        while True:
            yield b"data: {}\n\n"

    async def send(_message):
        await asyncio.Event().wait()

    async def receive():
        await asyncio.Event().wait()
        return {}

    made = events()
    with pytest.raises(ClientGone):
        await EventStream(made, 0.1)({"type": "http"}, receive, send)
    assert [event async for event in made] == []  # it was closed


async def test_admission_is_bounded():
    async with running(max_running_requests=1) as gateway:
        gateway.scripts["thinker"].hold = True
        asking = asyncio.create_task(gateway.chat(ASK))
        await gateway.scripts["thinker"].holding.wait()
        response = await gateway.chat(ASK)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        asking.cancel()
        gateway.scripts["thinker"].hold = False
        await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)
        assert (await gateway.chat(ASK)).status_code == 200


async def test_an_id_in_use_is_made_unique(gateway):
    gateway.scripts["thinker"].hold = True
    asking = asyncio.create_task(gateway.chat(ASK, headers={"x-request-id": "same"}))
    await gateway.scripts["thinker"].holding.wait()
    gateway.scripts["thinker"].hold = False
    response = await gateway.chat(ASK, headers={"x-request-id": "same"})
    assert response.headers["x-request-id"].startswith("same-")
    assert (await gateway.chat(ASK, headers={"x-request-id": "a b"})).headers["x-request-id"] != "a b"
    asking.cancel()


async def test_models_and_operations(gateway):
    (model,) = (await gateway.http.get("/v1/models")).json()["data"]
    assert model["id"] == "scripted"
    assert model["quartet"]["voices"] == VOICES
    assert model["quartet"]["sample_rate_hz"] == SAMPLE_RATE_HZ
    assert model["quartet"]["output_modalities"] == ["text", "audio"]
    assert (await gateway.http.get("/v1/models/scripted")).json() == model
    assert (await gateway.http.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"
    assert (await gateway.http.get("/ready")).json()["stages"]["talker"] == "SERVING"
    await gateway.chat(SPEAK)
    metrics = (await gateway.http.get("/metrics")).text
    assert 'quartet_gateway_requests_total{path="/v1/chat/completions",status="200"}' in metrics
    assert (await gateway.http.get("/docs")).status_code == 200
    assert "max_frames" in (await gateway.http.get("/openapi.json")).text
