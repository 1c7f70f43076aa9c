"""`POST /v1/chat/completions` as users call it: the official `openai` client against four real processes."""

import base64
import io
import json
from typing import Literal

import av
import numpy as np
import openai
import pydantic
import pytest
import soundfile

from tests.support.clients.speech import ENDLESS_SPEECH, ENDLESS_TOKENS

pytestmark = pytest.mark.e2e

GREEDY_SPEECH = {"quartet": {"talker": {"temperature": 0, "max_frames": 24}}}
QUESTION = [{"role": "user", "content": "What do you see?"}]


@pytest.fixture(scope="module")
def client(stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def model(client) -> str:
    return client.models.list().data[0].id


def data_url(kind: str, file: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def test_text(client, model):
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=12)
    choice = whole.choices[0]
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert whole.usage.completion_tokens_details.audio_tokens == 0
    assert choice.message.audio is None

    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    assert {c.modality for c in chunks if c.choices} == {"text"}
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_text_streams_as_it_is_sampled(stack, client, model):
    endless = {"max_tokens": ENDLESS_TOKENS, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(model=model, messages=QUESTION, stream=True, **endless) as stream:
        assert next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
        assert stack.in_flight()["thinker"]


def test_sound_streams_before_the_text_is_whole(stack, client, model):
    with client.chat.completions.create(
        model=model,
        messages=QUESTION,
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "pcm16"},
        max_tokens=ENDLESS_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True, "quartet": {"talker": ENDLESS_SPEECH}},
    ) as stream:
        heard = (chunk.choices[0].delta.audio for chunk in stream if chunk.choices)
        assert next(audio for audio in heard if audio and audio.data)
        assert stack.in_flight()["thinker"]


def test_speech_streams_beside_the_text(client, model):
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "pcm16"},
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=GREEDY_SPEECH,
    )
    text, transcript, pcm, ids, usage = "", "", b"", set(), None
    facts = client.models.list().data[0].quartet
    first_samples = 0
    for chunk in stream:
        usage = chunk.usage or usage
        if not chunk.choices:
            continue
        delta = chunk.choices[0].delta
        text += delta.content or ""
        if delta.audio:
            transcript += delta.audio.transcript or ""
            pcm += base64.b64decode(delta.audio.data or "")
            first_samples = first_samples or len(pcm) // 2
            ids.add(delta.audio.id)
    assert usage
    details = usage.completion_tokens_details
    assert details
    frames = details.audio_tokens
    assert frames
    samples = np.frombuffer(pcm, np.int16)
    assert transcript == text != ""
    assert len(ids) == 1
    assert 0 < frames <= 24
    assert 0 < frames * 1920 - len(samples) < 1920  # the decoder's tail
    assert first_samples == facts["samples_per_frame"] - facts["trimmed_samples"]  # one codec frame
    assert np.abs(samples).max() > 100
    assert usage.completion_tokens == details.text_tokens + frames


@pytest.mark.parametrize("file_format", ["wav", "mp3", "flac", "opus", "aac", "pcm16"])
def test_speech_in_every_format(client, model, file_format):
    whole = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": file_format},
        temperature=0,
        max_tokens=8,
        extra_body=GREEDY_SPEECH,
    )
    message = whole.choices[0].message
    assert message.audio.transcript == message.content != ""
    assert message.audio.expires_at > whole.created
    file = base64.b64decode(message.audio.data)
    frames = whole.usage.completion_tokens_details.audio_tokens
    seconds = frames * 0.08
    if file_format == "pcm16":
        heard_s = len(file) / 2 / 24000
    elif file_format in ("wav", "flac"):
        samples, rate_hz = soundfile.read(io.BytesIO(file))
        assert rate_hz == 24000
        heard_s = len(samples) / rate_hz
    else:
        with av.open(io.BytesIO(file)) as container:
            heard_s = sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0))  # pyright: ignore[reportAttributeAccessIssue]
    assert heard_s == pytest.approx(seconds, abs=0.12)  # lossy codecs pad


def test_pictures_sounds_and_films_are_read(client, model, media):
    def prompt_tokens(*parts) -> openai.types.CompletionUsage:
        content = [*parts, {"type": "text", "text": "What is this?"}]
        messages = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=4)
        assert answer.choices[0].message.content is not None
        assert answer.usage
        return answer.usage

    plain = prompt_tokens()
    image = prompt_tokens({"type": "image_url", "image_url": {"url": data_url("image/png", media.image)}})
    spoken = {"data": base64.b64encode(media.audio).decode(), "format": "wav"}
    audio = prompt_tokens({"type": "input_audio", "input_audio": spoken})
    audio_url = prompt_tokens({"type": "audio_url", "audio_url": {"url": data_url("audio/wav", media.audio)}})
    video = prompt_tokens({"type": "video_url", "video_url": {"url": data_url("video/mp4", media.video)}})
    assert image.prompt_tokens > plain.prompt_tokens
    assert video.prompt_tokens > plain.prompt_tokens
    assert audio.prompt_tokens == audio_url.prompt_tokens > plain.prompt_tokens
    assert audio.prompt_tokens_details
    assert plain.prompt_tokens_details
    assert (audio.prompt_tokens_details.audio_tokens or 0) > 0
    assert plain.prompt_tokens_details.audio_tokens == 0


def test_several_answers_stop_strings_seeds_and_logprobs(client, model):
    def ask(**options):
        return client.chat.completions.create(model=model, messages=QUESTION, max_tokens=10, **options).choices

    first, second = ask(n=2, seed=1, temperature=1)
    assert first.index == 0
    assert second.index == 1
    assert first.message.content != second.message.content
    assert ask(seed=1, temperature=1)[0].message.content == first.message.content

    whole = ask(temperature=0)[0].message.content
    stop = whole[len(whole) // 2 :][:2]
    (stopped,) = ask(temperature=0, stop=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == whole[: whole.index(stop)]

    (choice,) = ask(temperature=0, logprobs=True, top_logprobs=3)
    assert len(choice.logprobs.content) == 10
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(t.logprob for t in token.top_logprobs)


def test_structured_output(client, model):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content)["n"] in (1, 2)


class Lamp(pydantic.BaseModel):
    colour: Literal["red", "blue"]
    is_on: bool


class Scene(pydantic.BaseModel):
    """Sets the lamps of a room."""

    main: Lamp
    others: list[Lamp] = pydantic.Field(min_length=1, max_length=2)
    dimmed: Literal[1, 2] | None


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_of_nested_models_is_called_and_its_call_comes_back(client, model, stream):
    asked = {"model": model, "temperature": 0, "tools": [openai.pydantic_function_tool(Scene, name="scene")]}
    forced = asked | {"messages": QUESTION, "max_tokens": 512}
    forced["tool_choice"] = {"type": "function", "function": {"name": "scene"}}
    if stream:
        with client.chat.completions.stream(**forced) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.parse(**forced).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "scene"
    assert isinstance(call.function.parsed_arguments, Scene)
    messages = [*QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    answer = client.chat.completions.create(**asked, messages=messages, tool_choice="none", max_tokens=8)
    assert answer.choices[0].message.content
