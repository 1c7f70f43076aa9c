"""The parts of the OpenAI layer that need no server."""

import json
import time

import av
import numpy as np
import pytest

from gateway.answers.answer import logprobs
from gateway.answers.request import ChatCompletionRequest
from gateway.answers.transcripts import Transcripts
from gateway.errors import request_field
from gateway.http.connection import sse
from gateway.media.encode import encode_audio
from quartet.v1 import thinker_pb2


@pytest.mark.parametrize("rate_hz", [16000, 22050, 24000, 48000])
@pytest.mark.parametrize("file_format", ["wav", "flac", "mp3", "opus", "aac"])
def test_files_decode_to_the_sound_they_hold(tmp_path, file_format, rate_hz):
    samples = (np.sin(np.arange(rate_hz) * 2 * np.pi * 440 / rate_hz) * 12000).astype("<i2")
    file = tmp_path / "sound"
    file.write_bytes(encode_audio(samples.tobytes(), rate_hz, file_format))
    with av.open(file) as container:
        frames = list(container.decode(audio=0))  # pyright: ignore[reportAttributeAccessIssue]
        decoded = np.concatenate([frame.to_ndarray().astype(np.float64).mean(0).ravel() for frame in frames])
        decoded_rate_hz = frames[0].sample_rate
    if file_format in ("wav", "flac"):
        assert decoded_rate_hz == rate_hz
        np.testing.assert_array_equal(decoded, samples)
    else:
        assert len(decoded) / decoded_rate_hz == pytest.approx(1, abs=0.12)  # lossy codecs pad
        assert decoded_rate_hz >= min(rate_hz, 48000)
        spectrum = np.abs(np.fft.rfft(decoded))
        assert spectrum.argmax() * decoded_rate_hz / len(decoded) == pytest.approx(440, abs=5)


def test_pcm16_is_as_it_came():
    assert encode_audio(b"\1\2\3\4", 24000, "pcm16") == b"\1\2\3\4"


def test_sse_events_are_one_line_whatever_the_text():
    event = sse({"text": "a\nb\r\n\u2028 世界"})
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event[:-2].count(b"\n") == event.count(b"\r") == 0
    assert json.loads(event[6:])["text"] == "a\nb\r\n\u2028 世界"


@pytest.mark.parametrize(
    ("stage", "field", "expected"),
    [
        ("thinker", "sampling.top_p", "top_p"),
        ("thinker", "start.sampling.stop[1]", "stop[1]"),
        ("thinker", "sampling.json_schema", "response_format.json_schema.schema"),
        ("thinker", "messages[2].content[0]", "messages[2].content[0]"),
        ("thinker", "messages[1].tool_calls[0].arguments_json", "messages[1].tool_calls[0].function.arguments"),
        ("thinker", "tools[1].parameters_json", "tools[1].function.parameters"),
        ("thinker", "chat_template_kwargs_json", "quartet.thinker.chat_template_kwargs"),
        ("talker", "speaker", "audio.voice"),
        ("talker", "token_ids", "messages"),
        ("talker", "sampling.max_frames", "quartet.talker.max_frames"),
    ],
)
def test_stage_fields_are_named_as_in_the_request(stage, field, expected):
    assert request_field(stage, field) == expected


def test_logprobs_are_json_numbers():
    token = thinker_pb2.TokenLogprob(token="a", logprob=-float("inf"))
    assert logprobs([token])[0]["logprob"] == -9999


def test_what_clients_send_back_is_read():
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = ChatCompletionRequest.model_validate_json(
        json.dumps(
            {
                "model": "m",
                "messages": [
                    {"role": "developer", "content": "be brief"},
                    {"role": "user", "content": "hi", "name": "ann"},
                    answer | {"tool_calls": [call]},
                    {"role": "tool", "content": [{"type": "text", "text": "1"}], "tool_call_id": "c"},
                ],
                "user": "u",
                "metadata": {"a": "b"},
                "temperature": None,
                "mm_processor_kwargs": {"use_audio_in_video": True},
            }
        )
    )
    assert request.use_audio_in_video
    request.check()


def test_transcripts_expire(monkeypatch):
    transcripts = Transcripts(ttl_s=10)
    audio_id, expires_at = transcripts.new_id()
    transcripts.put(audio_id, expires_at, "said")
    assert transcripts.get(audio_id) == "said"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 11)
    assert transcripts.get(audio_id) is None
