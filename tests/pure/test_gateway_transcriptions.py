"""`POST /v1/audio/transcriptions` and `/v1/audio/translations` over HTTP, with a scripted thinker."""

import asyncio
import base64
import io
import itertools
import json
import re
import signal
import tempfile
import threading
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from gateway.answers.transcription import audio_sources
from gateway.answers.transcription.audio_sources import FileSound
from gateway.answers.transcription.formats import Segment, srt, vtt
from gateway.http.connection import drain
from gateway.listening.silero import RATE_HZ
from gateway.listening.speech_windows import MAX_WINDOW_S, Pauses, WindowFinder
from gateway.media.encode import encode_audio
from gateway.media.long_sounds import SoundFile
from gateway.tasks import cancel
from quartet.v1 import thinker_pb2
from services.common.errors import ContextTooLong, InternalError, InvalidInput, QueueFull
from services.common.media.sound import read_sound
from tests.support.disks import small_disk
from tests.support.scripted.preprocessing import processes
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/audio/transcriptions"
QUESTION = Path(__file__).parents[2] / "cli" / "assets" / "question.wav"
SAID = "".join(PIECES)
SPOKEN_S = (0.0, 1.75)  # where in QUESTION there is speech


@cache
def spoken(times: int, gap_s: float = 1.5) -> bytes:
    """PCM16 of QUESTION so many times, a faint noise before, between and after."""
    question, rate_hz = soundfile.read(QUESTION, dtype="int16")
    assert rate_hz == RATE_HZ
    noise = (np.random.default_rng(0).standard_normal(int(gap_s * RATE_HZ)) * 20).astype("<i2")
    return np.concatenate([noise, *[question, noise] * times]).tobytes()


@cache
def talk() -> bytes:
    """An MP3 of it three times."""
    return encode_audio(spoken(3), RATE_HZ, "mp3")


def begins(times: int, gap_s: float = 1.5) -> list[float]:
    """When each of them begins, in seconds."""
    length_s = soundfile.info(QUESTION).duration
    return [gap_s + i * (length_s + gap_s) for i in range(times)]


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


async def post(gateway: Running, path: str = PATH, sound: bytes | None = None, **fields: Any) -> httpx.Response:
    file = talk() if sound is None else sound
    files = {} if file == b"none" else {"file": ("a.mp3", file)}
    form = {name: value for name, value in {"model": "scripted", **fields}.items() if value is not None}
    return await gateway.http.post(path, data=form, files=files or {"other": b""})


async def test_each_stretch_of_speech_is_asked_for_and_told_in_order(gateway):
    response = await post(gateway, language="de", prompt="Quartet", temperature="0.2")
    assert response.status_code == 200, response.text
    assert response.json() == {
        "text": " ".join([SAID] * 3),
        "usage": {
            "type": "tokens",
            "input_tokens": 30,
            "input_token_details": {"audio_tokens": 9, "text_tokens": 21},
            "output_tokens": 9,
            "total_tokens": 39,
        },
    }
    starts: list[thinker_pb2.GenerateStart] = gateway.scripts["thinker"].requests
    assert len({start.request_id for start in starts}) == 3
    for start in starts:
        (message,) = start.messages
        sound, text = message.content
        assert text.text == "Transcribe the German audio into text. Names and terms in it may be: Quartet"
        assert start.sampling.temperature == pytest.approx(0.2)
        with wave.open(io.BytesIO(sound.media.data)) as file:
            assert (file.getframerate(), file.getnchannels()) == (RATE_HZ, 1)
            assert 1.5 < file.getnframes() / RATE_HZ < 2.6


@pytest.mark.parametrize("path", [PATH, "/v1/audio/translations"])
async def test_how_a_transcript_is_sampled(gateway, path):
    sampling: dict[str, Any] = {"seed": 7, "top_p": 0.5, "top_k": 5, "min_p": 0.25, "repetition_penalty": 1.5}
    sampling |= {"frequency_penalty": -0.5, "presence_penalty": 0.5}
    assert (await post(gateway, path, **sampling, priority=5)).status_code == 200
    for start in gateway.scripts["thinker"].requests:
        assert start.priority == 5
        assert {name: getattr(start.sampling, name) for name in sampling} == sampling
    for name in sampling:
        wrong: dict[str, Any] = {name: "many"}
        error = (await post(gateway, path, **wrong)).json()["error"]
        assert (error["param"], error["code"]) == (name, "invalid_value")
    await post(gateway, path)
    assert gateway.scripts["thinker"].requests[-1].priority == 0
    assert not any(gateway.scripts["thinker"].requests[-1].sampling.HasField(name) for name in sampling)


@pytest.mark.parametrize("path", [PATH, "/v1/audio/translations"])
async def test_the_best_transcript_of_a_search(gateway, path):
    told = await post(gateway, path, use_beam_search="true", n="3", length_penalty="0.5")
    assert told.json()["text"] == " ".join([SAID] * 3), told.text
    for start in gateway.scripts["thinker"].requests:
        assert start.beams == thinker_pb2.BeamSearch(width=3, length_penalty=0.5)
    bad: dict[str, Any] = {
        "stream": {"stream": "true"},
        "repetition_penalty": {"repetition_penalty": "1.5"},
        "n": {"n": "9"},
    }
    for name, given in bad.items():
        refused = await post(gateway, path, use_beam_search="true", **{"n": "2"} | given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), refused.text
    assert (await post(gateway, path, n="2")).json()["error"]["param"] == "n"
    assert (await post(gateway, path, n="1")).status_code == 200


async def test_a_translation_is_into_the_language_that_is_named(gateway):
    path = "/v1/audio/translations"
    wanted: dict[str, Any] = {"response_format": "verbose_json", "language": "fr"}
    for given, name in (("de", "German"), ("zh-CN", "Chinese"), ("japanese", "Japanese"), (None, "English")):
        body = (await post(gateway, path, to_language=given, **wanted)).json()
        assert body["language"] == name.lower()
        text = gateway.scripts["thinker"].requests[-1].messages[0].content[1].text
        assert text == f"Listen to the provided French speech and produce a translation in {name} text."
    unknown = (await post(gateway, path, to_language="klingon")).json()["error"]
    assert unknown["message"] == "to_language: no language 'klingon'; use an ISO 639-1 code such as en, de or zh"
    refused = (await post(gateway, to_language="de")).json()["error"]
    assert (refused["param"], "use /v1/audio/translations" in refused["message"]) == ("to_language", True)


async def test_times_are_those_of_the_pauses(gateway):
    gateway.scripts["thinker"].logprobs = True
    fields: dict[str, Any] = {"response_format": "verbose_json", "language": "English"}
    fields["timestamp_granularities[]"] = "segment"
    body = (await post(gateway, **fields)).json()
    assert (body["task"], body["language"]) == ("transcribe", "english")
    assert body["duration"] == pytest.approx(len(spoken(3)) / 2 / RATE_HZ, abs=0.1)
    for i, (segment, begin_s) in enumerate(zip(body["segments"], begins(3), strict=True)):
        assert segment["start"] == pytest.approx(begin_s + SPOKEN_S[0], abs=0.3)
        assert segment["end"] == pytest.approx(begin_s + SPOKEN_S[1], abs=0.3)
        assert (segment["id"], segment["text"], segment["tokens"]) == (i, SAID, [0, 1, 2])
        assert segment["avg_logprob"] == pytest.approx(-0.5)
        assert segment["no_speech_prob"] < 0.5


async def test_subtitles_and_plain_text(gateway):
    srt = await post(gateway, response_format="srt")
    blocks = srt.text.strip().split("\n\n")
    assert len(blocks) == 3
    times = r"00:00:(\d\d),\d{3} --> 00:00:(\d\d),\d{3}"
    for i, (block, begin_s) in enumerate(zip(blocks, begins(3), strict=True), start=1):
        number, when, text = block.split("\n")
        match = re.fullmatch(times, when)
        assert match is not None
        assert abs(int(match[1]) - begin_s) < 1.3
        assert (number, text) == (str(i), SAID)
    vtt = await post(gateway, response_format="vtt")
    assert vtt.headers["content-type"].startswith("text/vtt")
    assert vtt.text == "WEBVTT\n\n" + re.sub(r"(?m)^\d+\n", "", srt.text).replace(",", ".").replace(
        SAID.replace(",", "."), SAID
    )
    plain = await post(gateway, response_format="text")
    assert plain.text == " ".join([SAID] * 3) + "\n"


async def streamed(gateway, path: str = "/v1/audio/transcriptions", **fields) -> list[dict]:
    response = await post(gateway, path, stream="true", **fields)
    return [json.loads(line[6:]) for line in response.text.split("\n\n") if line]


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_a_stream(gateway, path):
    *deltas, done = await streamed(gateway, path)
    assert {tuple(event) for event in deltas} == {("type", "delta")}
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert len(deltas) >= 3
    assert "".join(event["delta"] for event in deltas) == done["text"] == " ".join([SAID] * 3)
    assert done["type"] == "transcript.text.done"
    assert done["usage"]["total_tokens"] == 39


async def test_a_stream_for_clients_of_vllm(gateway):
    """The events are OpenAI's still: a client of either reads the same text."""
    *deltas, done = events = await streamed(gateway, stream_include_usage="True")
    assert {(event["object"], event["model"], event["id"]) for event in events} == {
        ("transcription.chunk", "scripted", done["id"])
    }
    contents = [event["choices"][0]["delta"]["content"] for event in deltas]
    assert contents == [event["delta"] for event in deltas]
    assert "".join(contents) == done["text"] == " ".join([SAID] * 3)
    assert (done["choices"], done["type"]) == ([], "transcript.text.done")
    usage = done["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (usage["input_tokens"], usage["output_tokens"])
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"] == 39
    assert not [event for event in deltas if "usage" in event]
    fields = {"stream_include_usage": "True", "stream_continuous_usage_stats": "True"}
    counted = [event["usage"]["total_tokens"] for event in await streamed(gateway, **fields)]
    assert counted == sorted(counted)
    assert (counted[0], counted[-1]) == (0, 39)


async def test_a_translation(gateway):
    body = (await post(gateway, "/v1/audio/translations", response_format="verbose_json")).json()
    assert (body["task"], body["language"], body["text"]) == ("translate", "english", " ".join([SAID] * 3))
    (_, text), *_ = (start.messages[0].content for start in gateway.scripts["thinker"].requests)
    assert text.text == "Listen to the provided speech and produce a translation in English text."
    await gateway.reset()
    await post(gateway, "/v1/audio/translations", language="de")
    (_, text), *_ = (start.messages[0].content for start in gateway.scripts["thinker"].requests)
    assert text.text == "Listen to the provided German speech and produce a translation in English text."


async def test_openai_s_client(gateway):
    audio = gateway.openai.audio
    file = ("a.wav", encode_audio(spoken(1), RATE_HZ, "wav"))
    asked: dict[str, Any] = {"model": "scripted", "file": file}
    stream = await audio.transcriptions.create(**asked, stream=True)
    *deltas, done = [event async for event in stream]
    assert "".join(event.delta for event in deltas) == done.text == SAID
    assert (done.type, done.usage.total_tokens) == ("transcript.text.done", 13)
    for create in (audio.transcriptions.create, audio.translations.create):
        assert (await create(**asked)).text == SAID
        whole = await create(**asked, response_format="verbose_json")
        (segment,) = whole.segments
        assert (whole.text, segment.text) == (SAID, SAID)
        assert (segment.start, segment.end) == pytest.approx([begins(1)[0], begins(1)[0] + SPOKEN_S[1]], abs=0.3)
        assert await create(**asked, response_format="text") == f"{SAID}\n"
        assert (await create(**asked, response_format="srt")).startswith("1\n00:00:01,")
        assert (await create(**asked, response_format="vtt")).startswith("WEBVTT\n\n00:00:01.")


async def test_silence_is_not_asked_about(gateway):
    silence = encode_audio(bytes(2 * 3 * RATE_HZ), RATE_HZ, "wav")
    assert (await post(gateway, sound=silence)).json()["text"] == ""
    assert not gateway.scripts["thinker"].requests


async def test_several_windows_are_in_the_thinker_at_a_time_but_not_all(gateway):
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 1
    asking = asyncio.create_task(post(gateway, sound=encode_audio(spoken(9, 0.8), RATE_HZ, "flac")))
    await gateway.until(lambda: thinker.running >= 4)
    most = thinker.running
    thinker.go_on()
    assert (await asking).json()["text"] == " ".join([SAID] * 9)
    assert most <= 6 < len(thinker.requests) == 9


FORMS = {
    "nothing filled in": {"language": "", "prompt": "", "temperature": "", "chunking_strategy": "", "stream": ""},
    "a language to be found": {"language": "auto"},
    "one granularity": {"response_format": "verbose_json", "timestamp_granularities": "segment"},
    "a list by repetition": {"response_format": "verbose_json", "timestamp_granularities": ["segment", "segment"]},
}


@pytest.mark.parametrize("case", FORMS)
async def test_forms_as_people_send_them(gateway, case):
    assert (await post(gateway, **FORMS[case])).json()["text"] == " ".join([SAID] * 3)
    assert gateway.scripts["thinker"].requests[0].messages[0].content[1].text == "Transcribe the audio into text."


async def test_what_other_servers_call_otherwise(gateway):
    fields: dict[str, Any] = {"languages[]": "de", "keywords[]": ["Ada", "Ben"], "hotwords": "Cy", "prompt": "Quartet"}
    habits: dict[str, Any] = {"include[]": "logprobs", "temperature_inc": "0.2", "vad_filter": "true"}
    response = await post(gateway, **fields, **habits)
    assert response.headers["x-quartet-ignored"] == "include, temperature_inc, vad_filter"
    text = gateway.scripts["thinker"].requests[0].messages[0].content[1].text
    assert text == "Transcribe the German audio into text. Names and terms in it may be: Quartet, Ada, Ben, Cy"
    await gateway.reset()
    several: dict[str, Any] = {"languages[]": ["de", "en"]}
    await post(gateway, **several)
    assert gateway.scripts["thinker"].requests[0].messages[0].content[1].text == "Transcribe the audio into text."


async def test_a_file_needs_no_name(gateway):
    disposition = b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}

    async def send(sound: bytes) -> httpx.Response:
        body = disposition % (b"file", sound) + disposition % (b"model", b"scripted") + b"--b--\r\n"
        return await gateway.http.post(PATH, content=body, headers=headers)

    sound = encode_audio(spoken(1, gap_s=17), RATE_HZ, "wav")
    assert len(sound) > 1024 * 1024  # more than a text of a form may have
    assert (await send(sound)).json()["text"] == SAID
    error = (await send(b"a.mp3")).json()["error"]
    assert (error["param"], error["code"]) == ("file", "invalid_value")
    assert "-F file=@PATH" in error["message"]


@pytest.mark.parametrize("path", [PATH, "/v1/audio/translations"])
async def test_a_body_in_json(gateway, path):
    data = base64.b64encode(talk()).decode()
    url = f"data:audio/mpeg;base64,{data}"
    sounds = (
        {"file": data},
        {"file": url},
        {"file_url": url},
        {"input_audio": {"data": data, "format": "mp3"}},
        {"input_audio": {"data": url}},
    )
    for sound in sounds:
        body = {"model": "scripted", "language": None, "temperature": 0.2, **sound}
        response = await gateway.http.post(path, json=body)
        assert response.json()["text"] == " ".join([SAID] * 3)
    for body, param in (
        ({"model": "scripted"}, "file"),
        ({"model": "scripted", "file": "?"}, "file"),
        ({"input_audio": {"data": "?"}}, "input_audio.data"),
        ({"input_audio": {"format": "mp3"}}, "input_audio.data"),
        ({"input_audio": {"data": data}, "file": data}, "input_audio"),
        ({"file_id": "file-1", "file_url": url}, "file_url"),
        ({"file_id": "file-1"}, "file_id"),
        ({"file_url": data}, "file_url"),
        ({"file_url": "http://127.0.0.1/a.mp3"}, "file_url"),
        ({"model": "scripted", "file": "http://127.0.0.1/a.mp3"}, "file"),
        ({"model": "scripted", "file": data, "beams": 2}, "beams"),
    ):
        response = await gateway.http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_a_body_of_another_kind_is_named(gateway):
    for kind in ("audio/mpeg", "application/x-www-form-urlencoded", None):
        headers = {"content-type": kind} if kind else {}
        error = (await gateway.http.post(PATH, content=talk(), headers=headers)).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_form", None)
        assert (kind or "without a type") in error["message"]


BAD = {
    "no file": ({"sound": b"none"}, "other"),
    "empty file": ({"sound": b""}, "file"),
    "no sound": ({"sound": b"text, and no sound"}, "file"),
    "a picture": ({"sound": (QUESTION.parent / "picture.png").read_bytes()}, "file"),
    "unknown language": ({"language": "klingon"}, "language"),
    "unknown format": ({"response_format": "diarized_json"}, "response_format"),
    "word times": (
        {"response_format": "verbose_json", "timestamp_granularities[]": "word"},
        "timestamp_granularities",
    ),
    "times of letters": (
        {"response_format": "verbose_json", "timestamp_granularities[]": "letter"},
        "timestamp_granularities[0]",
    ),
    "times of no segments": ({"timestamp_granularities[]": "segment"}, "timestamp_granularities"),
    "too warm": ({"temperature": "2"}, "temperature"),
    "temperature no number": ({"temperature": "warm"}, "temperature"),
    "stream of subtitles": ({"stream": "true", "response_format": "srt"}, "stream"),
    "stream no boolean": ({"stream": "perhaps"}, "stream"),
    "speakers": ({"known_speaker_names[]": "alice"}, "known_speaker_names"),
    "unknown member": ({"beams": "2"}, "beams"),
    "unknown strategy": ({"chunking_strategy": "energy"}, "chunking_strategy"),
    "no tokens": ({"max_completion_tokens": "0"}, "max_completion_tokens"),
    "threshold too high": (
        {"chunking_strategy": '{"type": "server_vad", "threshold": 2}'},
        "chunking_strategy.threshold",
    ),
    "no pause at all": (
        {"chunking_strategy": '{"type": "server_vad", "silence_duration_ms": 1}'},
        "chunking_strategy.silence_duration_ms",
    ),
    "format of a translation": ({"path": "/v1/audio/translations", "response_format": "ass"}, "response_format"),
    "language of a translation": ({"path": "/v1/audio/translations", "language": "xx"}, "language"),
    "stream of a translation": (
        {"path": "/v1/audio/translations", "stream": "true", "response_format": "srt"},
        "stream",
    ),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_names_the_member(gateway, case):
    fields, param = BAD[case]
    response = await post(gateway, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert not gateway.scripts["thinker"].requests


async def test_bad_input_disturbs_nobody(gateway):
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 1
    good = asyncio.create_task(post(gateway))
    await gateway.until(lambda: thinker.running == 3)
    refused = await asyncio.gather(*(post(gateway, **fields) for fields, _ in BAD.values()))
    assert {response.status_code for response in refused} == {400}
    thinker.go_on()
    assert (await good).json()["text"] == " ".join([SAID] * 3)
    assert len(thinker.requests) == 3


@pytest.mark.parametrize(
    ("error", "status"), [(QueueFull("full"), 429), (InternalError("x"), 500), (InvalidInput("messages", "no"), 400)]
)
async def test_errors_of_the_thinker(gateway, error, status):
    gateway.scripts["thinker"].error = error
    assert (await post(gateway)).status_code == status


async def test_a_fault_of_our_own_ends_the_request(gateway, monkeypatch):
    def fault(*_) -> bytes:
        raise RuntimeError("a fault")

    monkeypatch.setattr("gateway.answers.transcription.run.encode_audio", fault)
    assert (await post(gateway)).status_code == 500


async def test_what_the_thinker_refuses_has_the_request_s_name(gateway):
    gateway.scripts["thinker"].error = ContextTooLong("messages", "too long")
    for prompt, param in (("Quartet", "prompt"), (None, "file")):
        error = (await post(gateway, prompt=prompt)).json()["error"]
        assert (error["param"], error["message"]) == (param, f"{param}: too long")


async def test_a_client_that_leaves_ends_all_windows(gateway):
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 1
    asking = asyncio.create_task(post(gateway))
    await gateway.until(lambda: thinker.running == 3)
    asking.cancel()
    await gateway.until(lambda: thinker.ended == ["cancelled"] * 3)


async def test_windows_of_speech_without_a_pause_fit_a_request():
    question, _ = soundfile.read(QUESTION, dtype="int16")
    speech = np.concatenate([question[: int(1.7 * RATE_HZ)]] * 40).tobytes()
    finder = WindowFinder(Pauses())
    found = [window for i in range(0, len(speech), 5000) for window in finder.add(speech[i : i + 5000])]
    found += finder.close()
    assert len(found) > 2
    assert all(len(window.pcm16) / 2 / RATE_HZ <= MAX_WINDOW_S for window in found)
    for window, following in itertools.pairwise(found):
        assert window.end_s == following.begin_s
    heard = b"".join(window.pcm16 for window in found)
    assert heard in speech.ljust(len(speech) + 1024, b"\0")


async def test_empty_lines_do_not_end_a_subtitle():
    segments = [Segment(0, 1.0, 2.5, 1.0, "One.\n\n  Two --> three.")]
    assert srt(segments) == "1\n00:00:01,000 --> 00:00:02,500\nOne.\nTwo --> three.\n\n"
    assert vtt(segments) == "WEBVTT\n\n00:00:01.000 --> 00:00:02.500\nOne.\nTwo -> three.\n\n"


async def test_who_leaves_during_a_long_silence_ends_the_listening(gateway, monkeypatch):
    listening, ended = threading.Event(), threading.Event()

    def silence(_: SoundFile) -> Iterator[np.ndarray]:
        end = time.monotonic() + 120  # a guard: the thread of a gateway that goes on listening would never end
        try:
            while time.monotonic() < end:
                yield np.zeros(1600, np.float32)
                listening.set()
        finally:
            ended.set()

    monkeypatch.setattr(SoundFile, "_read", silence)
    asking = asyncio.create_task(post(gateway))
    await gateway.until(listening.is_set)
    asking.cancel()
    await gateway.until(ended.is_set)


async def test_a_crash_of_its_decoder_is_the_sounds(gateway, monkeypatch):
    read, decoding = SoundFile._read, threading.Event()

    def read_and_tell(file: SoundFile) -> Iterator[np.ndarray]:
        for piece in read(file):
            decoding.set()
            yield piece

    monkeypatch.setattr(SoundFile, "_read", read_and_tell)
    asking = asyncio.create_task(post(gateway, sound=silence(3600)))
    await gateway.until(decoding.is_set)
    # not sooner: one that dies before it decodes is no file's fault
    for process in processes(gateway.app.state.gateway.fetcher.decoding.sounds.decoders):
        process.send_signal(signal.SIGSEGV)
    error = (await asking).json()["error"]
    assert (asking.result().status_code, error["code"], error["param"]) == (400, "invalid_media", "file")
    assert "its decoder crashed" in error["message"]
    assert (await post(gateway)).json()["text"]


async def test_sound_that_is_too_long_for_the_time_is_an_error(gateway, monkeypatch):
    monkeypatch.setattr("gateway.answers.transcription.audio_sources.FileSound.left_s", lambda self: 0.0)
    assert (await post(gateway)).status_code == 504


@cache
def silence(seconds: int, rate_hz: int = 8000) -> bytes:
    """A FLAC file, 4,000 times smaller than its sound."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(seconds * rate_hz, np.int16), rate_hz, format="FLAC")
    return file.getvalue()


async def test_hours_of_silence_delay_nobody(gateway, monkeypatch):
    """With one thread, one file is enough to take all of them."""
    monkeypatch.setattr(audio_sources, "_LISTENERS", ThreadPoolExecutor(1))
    long = asyncio.create_task(post(gateway, sound=silence(3600)))
    await asyncio.sleep(0.5)
    began = time.monotonic()
    assert (await post(gateway)).json()["text"]
    assert time.monotonic() - began < 5
    assert not long.done()
    long.cancel()


async def test_an_owner_s_files_wait_for_each_other_and_for_no_other_owner(gateway, monkeypatch):
    files = gateway.app.state.gateway.fetcher.decoding.sounds
    monkeypatch.setattr(audio_sources, "_LISTENERS", ThreadPoolExecutor(1))
    content = silence(3600)
    many = [FileSound(files, content, Pauses(), 60, owner="alice") for _ in range(16)]
    listening = [asyncio.create_task(drain(sound.windows())) for sound in many]
    while sum(sound.duration_s for sound in many) < 10:
        await asyncio.sleep(0.01)
    before_s = sum(sound.duration_s for sound in many)
    await drain(FileSound(files, silence(25), Pauses(), 60, owner="bob").windows())
    assert sum(sound.duration_s for sound in many) - before_s < 80  # some rounds of 10 s
    await cancel(*listening)


async def test_the_longest_sound_is_a_limit_whether_the_file_says_how_long_it_is_or_not(gateway, monkeypatch):
    monkeypatch.setattr(gateway.app.state.gateway.settings, "max_transcription_s", 20.0)
    claimed = silence(21)
    length = slice(21, 26)  # of a FLAC: 36 bits, 0 means unknown
    unclaimed = claimed[:21] + bytes([claimed[21] & 0xF0, 0, 0, 0, 0]) + claimed[26:]
    assert claimed[length] != unclaimed[length]
    for sound in (claimed, unclaimed):
        refused = await post(gateway, sound=sound)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_media"), refused.text
        assert "20 s" in refused.json()["error"]["message"]
    assert (await post(gateway, sound=silence(19))).json()["text"] == ""


async def test_an_upload_that_finds_no_room_fails_alone(gateway, tmp_path, monkeypatch):
    with small_disk(tmp_path / "disk", 1) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        refused = await post(gateway, sound=bytes(3 * 1024 * 1024))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_failed")
        assert refused.headers["retry-after"]
        assert (await post(gateway)).json()["text"]


async def test_a_broken_detector_is_an_error_and_no_hang(gateway, monkeypatch):
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr("gateway.answers.transcription.audio_sources.WindowFinder.add", broken)
    assert (await post(gateway)).status_code == 500


async def test_what_is_decoded_is_the_sound_whatever_the_file():
    for file_format in ("wav", "flac", "mp3", "opus", "aac"):
        samples = np.concatenate(list(read_sound(encode_audio(spoken(1), RATE_HZ, file_format), RATE_HZ)))
        assert len(samples) == pytest.approx(len(spoken(1)) / 2, abs=0.1 * RATE_HZ)
