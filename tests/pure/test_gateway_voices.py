"""Voices that are uploaded to be imitated, over HTTP, with scripted stages."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
from structlog.testing import capture_logs
from websockets.asyncio.client import connect

from gateway.media.encode import encode_audio
from services.common.errors import InvalidInput
from tests.support.clients.voices import (
    FIELDS,
    IMITATOR,
    PIPELINE,
    RATE_HZ,
    SAMPLE,
    SPEECH,
    TONE_HZ,
    VOICES,
    base64_of,
    heard,
    listed,
    pitch_hz,
    speak,
    tone,
    upload,
    wav,
)
from tests.support.samples.media import png
from tests.support.scripted.code2wav import PCM16
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def imitator(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with running(PIPELINE, IMITATOR, voices_dir=tmp_path_factory.mktemp("state") / "voices") as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(imitator: Running) -> AsyncIterator[Running]:
    """Before a talker that imitates voices and has none."""
    yield imitator
    for voice in await listed(imitator):
        await imitator.http.delete(f"{VOICES}/{voice}")
    await imitator.reset()


async def test_a_voice_from_its_upload_to_its_removal(gateway):
    voices = gateway.openai.audio.voices
    voice = await voices.create(name="anna", audio_sample=("a.wav", SAMPLE), consent="cons_1")
    assert (voice.name, voice.object, voice.type) == ("anna", "audio.voice", "audio_sample")
    body = (await gateway.http.get(VOICES)).json()
    assert body["voices"] == [{"id": voice.id, "name": "anna"}]
    (told,) = body["uploaded_voices"]
    assert body["data"] == [{**told, "default": False}]
    assert (told["id"], told["consent"], told["ref_text"], told["seconds"]) == (voice.id, "cons_1", None, 1.5)

    for named in ("ANNA", voice.id, {"id": "anna"}):
        response = await speak(gateway, voice=named, language="English", seed=5)
        assert (response.status_code, response.content) == (200, PCM16), response.text
    starts = gateway.scripts["talker"].requests
    assert {(start.speaker, start.sampling.seed, start.text.language) for start in starts} == {("", 5, "english")}
    for start in starts:
        assert start.text.voice_sample.text == ""
        assert not start.text.HasField("whole_text_first")
        sample = heard(start)
        assert len(sample) == 1.5 * RATE_HZ
        assert pitch_hz(sample) == pytest.approx(TONE_HZ, abs=1)
        assert np.abs(sample).max() == pytest.approx(0.3, abs=0.01)

    deleted = await voices.delete(voice.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (voice.id, True, "audio.voice.deleted")
    with pytest.raises(openai.NotFoundError):
        await voices.delete(voice.id)
    assert await listed(gateway) == []
    assert (await speak(gateway, voice=voice.id)).json()["error"]["param"] == "voice"


@pytest.mark.parametrize("file_format", ["wav", "flac", "mp3", "opus", "aac"])
async def test_samples_of_any_format_are_mixed_and_resampled(gateway, file_format):
    sound = np.rint(32767 * tone(2, 44_100, channels=2)).astype("<i2")
    file = encode_audio(sound.tobytes(), 44_100, file_format, channels=2)
    assert (await upload(gateway, file)).status_code == 200
    assert (await speak(gateway, voice="anna")).status_code == 200
    (start,) = gateway.scripts["talker"].requests
    sample = heard(start)
    assert len(sample) / RATE_HZ == pytest.approx(2, abs=0.1)  # lossy codecs pad
    assert pitch_hz(sample) == pytest.approx(TONE_HZ, abs=1)
    assert np.abs(sample[RATE_HZ // 2 : RATE_HZ]).max() == pytest.approx(0.15, abs=0.02)  # the mean of both channels


@pytest.mark.parametrize("channels", [8, 9, 64])
async def test_samples_of_many_channels(gateway, channels):
    sound = np.repeat(tone(1.2), channels, axis=1)
    assert (await upload(gateway, wav(sound))).status_code == 200
    assert (await speak(gateway, voice="anna")).status_code == 200
    (start,) = gateway.scripts["talker"].requests
    assert pitch_hz(heard(start)) == pytest.approx(TONE_HZ, abs=1)


async def test_a_sample_that_comes_with_the_text(gateway):
    given = {
        "ref_audio": f"data:audio/wav;base64,{base64_of(SAMPLE)}",
        "ref_text": "A tone.",
        "task_type": "Base",
        "voice": "vivian",
    }
    assert (await speak(gateway, **given, non_streaming_mode=True)).content == PCM16
    assert (await speak(gateway, **given, x_vector_only_mode=True, non_streaming_mode=False)).content == PCM16
    assert (await speak(gateway, ref_audio=base64_of(SAMPLE), language="AUTO")).content == PCM16
    starts = [start.text for start in gateway.scripts["talker"].requests]
    assert [text.voice_sample.text for text in starts] == ["A tone.", "", ""]
    assert [text.whole_text_first for text in starts[:2]] == [True, False]
    assert not starts[2].HasField("whole_text_first")
    assert {len(text.voice_sample.samples.inline) for text in starts} == {4 * int(1.5 * RATE_HZ)}


async def test_what_is_said_in_an_uploaded_sample_is_used_unless_it_is_not_to_be(gateway):
    created = (await upload(gateway, ref_text=" A tone. ")).json()
    assert (created["ref_text"], created["voice"]["name"], created["success"]) == ("A tone.", "anna", True)
    for mode in (None, False, True):
        await speak(gateway, voice="anna", x_vector_only_mode=mode)
    said = [start.text.voice_sample.text for start in gateway.scripts["talker"].requests]
    assert said == ["A tone.", "A tone.", ""]


async def test_long_text_is_spoken_in_one_voice(gateway, monkeypatch):
    """And the longest sample goes through gRPC with each piece."""
    assert (await upload(gateway, wav(tone(30)))).status_code == 200
    monkeypatch.setattr("gateway.answers.voice_options.SpeakPlan.most_bytes", lambda *_: 20)
    response = await speak(gateway, voice="anna", input="One sentence. And a second one! A third. Four.")
    starts = gateway.scripts["talker"].requests
    assert response.content == PCM16 * len(starts)
    assert len(starts) > 2
    assert {len(heard(start)) for start in starts} == {30 * RATE_HZ}


async def test_typed_text_is_spoken_in_an_uploaded_voice(gateway):
    await upload(gateway)
    messages = [
        {"type": "session.config", "model": "scripted", "voice": "anna", "response_format": "pcm"},
        {"type": "input.text", "text": "Good"},
        {"type": "input.done"},
    ]
    async with connect(gateway.url.replace("http", "ws") + SPEECH + "/stream", open_timeout=60) as socket:
        for message in messages:
            await socket.send(json.dumps(message))
        audio = b"".join([message async for message in socket if isinstance(message, bytes)])
    assert audio == PCM16
    (start,) = gateway.scripts["talker"].requests
    assert len(heard(start)) == 1.5 * RATE_HZ
    assert (start.text.HasField("whole_text_first"), start.text.whole_text_first) == (True, False)


async def test_speech_goes_on_while_voices_come_and_go(gateway):
    script = gateway.scripts["code2wav"]
    script.hold, script.after = True, 1
    await upload(gateway, name="bert")
    speaking = asyncio.create_task(speak(gateway, voice="bert"))
    await script.holding.wait()
    assert (await upload(gateway)).status_code == 200
    assert (await upload(gateway, b"no sound")).status_code == 400
    assert (await gateway.http.delete(f"{VOICES}/bert")).status_code == 200
    script.go_on()
    assert (await speaking).content == PCM16


async def test_the_log_has_ids_and_nothing_else_of_a_voice(gateway):
    with capture_logs() as lines:
        voice = (await upload(gateway, name="secretname", consent="secretconsent", ref_text="secrettext")).json()["id"]
        await speak(gateway, voice="secretname")
        await speak(gateway, voice="secretnobody", ref_text="secrettext")
        await gateway.http.delete(f"{VOICES}/secretname")
    requests = [line for line in lines if line["event"] == "request"]
    assert [line.get("voice") for line in requests] == [voice, voice, None, voice]
    assert [line["path"] for line in requests] == [VOICES, SPEECH, SPEECH, f"{VOICES}/{{voice}}"]
    assert "secret" not in str(lines)


BAD_UPLOADS: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "no file": ({"sample": None}, 400, "audio_sample"),
    "a text for the file": ({"sample": None, "audio_sample": "abc"}, 400, "audio_sample"),
    "empty file": ({"sample": b""}, 400, "audio_sample"),
    "no sound": ({"sample": b"no sound" * 100}, 400, "audio_sample"),
    "a picture": ({"sample": png(8, 8)}, 400, "audio_sample"),
    "half a header": ({"sample": SAMPLE[:20]}, 400, "audio_sample"),
    "header alone": ({"sample": SAMPLE[:44]}, 400, "audio_sample"),
    "a playlist": ({"sample": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"}, 400, "audio_sample"),
    "unknown codec": ({"sample": SAMPLE[:20] + b"\x99\x99" + SAMPLE[22:]}, 400, "audio_sample"),
    "too short": ({"sample": wav(tone(0.99))}, 400, "audio_sample"),
    "too long": ({"sample": wav(tone(30.2))}, 400, "audio_sample"),
    "too many bytes": ({"sample": bytes(10 * 1024 * 1024 + 1)}, 400, "audio_sample"),
    "silence": ({"sample": wav(tone(loudness=0.0))}, 400, "audio_sample"),
    "nearly silence": ({"sample": wav(tone(loudness=0.0005))}, 400, "audio_sample"),
    "not a number": ({"sample": wav(np.full((24_000, 1), np.nan, np.float32), subtype="FLOAT")}, 400, "audio_sample"),
    "no name": ({"name": None}, 400, "name"),
    "empty name": ({"name": ""}, 400, "name"),
    "name with a space": ({"name": "anna b"}, 400, "name"),
    "name of a path": ({"name": "../anna"}, 400, "name"),
    "name too long": ({"name": "a" * 65}, 400, "name"),
    "name in other letters": ({"name": "\N{CYRILLIC SMALL LETTER A}nna"}, 400, "name"),
    "no consent": ({"consent": None}, 400, "consent"),
    "blank consent": ({"consent": " "}, 400, "consent"),
    "long consent": ({"consent": "a" * 2001}, 400, "consent"),
    "blank text": ({"ref_text": " \n"}, 400, "ref_text"),
    "long text": ({"ref_text": "a" * 2001}, 400, "ref_text"),
    "a voice of a text": ({"type": "prompt"}, 400, "type"),
    "unknown field": ({"speaker_embedding": "[1]"}, 400, "speaker_embedding"),
    "the name is taken": ({"name": "TAKEN"}, 409, "name"),
}


@pytest.mark.parametrize("case", BAD_UPLOADS)
async def test_bad_uploads_name_the_field(gateway, case):
    fields, status, param = BAD_UPLOADS[case]
    await upload(gateway, name="taken")
    response = await upload(gateway, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert error["type"] == "invalid_request_error"
    assert await listed(gateway) == ["taken"]


async def test_bodies_that_are_no_form(gateway):
    for body in ({"json": FIELDS}, {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}}):
        response = await gateway.http.post(VOICES, **body)
        assert response.status_code == 400, response.text


BAD_SPEECH: dict[str, tuple[dict[str, Any], str]] = {
    "no voice": ({}, "voice"),
    "unknown voice": ({"voice": "bob"}, "voice"),
    "OpenAI's, of a model without": ({"voice": "alloy"}, "voice"),
    "unknown voice id": ({"voice": {"id": "voice_1"}}, "voice"),
    "voice no text": ({"voice": 5}, "voice"),
    "instructions": ({"voice": "anna", "instructions": "Softly."}, "instructions"),
    "unknown language": ({"voice": "anna", "language": "klingon"}, "language"),
    "language no text": ({"voice": "anna", "language": ["english"]}, "language"),
    "unknown task": ({"voice": "anna", "task_type": "Voice"}, "task_type"),
    "another model's task": ({"voice": "anna", "task_type": "CustomVoice"}, "task_type"),
    "mode no bool": ({"voice": "anna", "non_streaming_mode": "yes"}, "non_streaming_mode"),
    "text without a sample": ({"voice": "anna", "ref_text": "A tone."}, "ref_text"),
    "no text is known": ({"voice": "anna", "x_vector_only_mode": False}, "x_vector_only_mode"),
    "mode without a text": ({"ref_audio": "SAMPLE", "x_vector_only_mode": False}, "ref_text"),
    "sample no text": ({"ref_audio": 5}, "ref_audio"),
    "empty sample": ({"ref_audio": ""}, "ref_audio"),
    "no base64": ({"ref_audio": "!!!"}, "ref_audio"),
    "no sound": ({"ref_audio": "bm8gc291bmQ="}, "ref_audio"),
    "a picture": ({"ref_audio": "data:image/png;base64,AAAA"}, "ref_audio"),
    "half a data URL": ({"ref_audio": "data:audio/wav"}, "ref_audio"),
    "a private address": ({"ref_audio": "http://127.0.0.1:9/a.wav"}, "ref_audio"),
    "a file": ({"ref_audio": "file:///etc/passwd"}, "ref_audio"),
    "silence": ({"ref_audio": "SILENCE"}, "ref_audio"),
    "too short": ({"ref_audio": "SHORT"}, "ref_audio"),
    "long text": ({"ref_audio": "SAMPLE", "ref_text": "a" * 2001}, "ref_text"),
    "text no text": ({"ref_audio": "SAMPLE", "ref_text": 1}, "ref_text"),
}


@pytest.mark.parametrize("case", BAD_SPEECH)
async def test_bad_speech_names_the_member(gateway, case):
    members, param = BAD_SPEECH[case]
    sounds = {"SAMPLE": SAMPLE, "SILENCE": wav(tone(loudness=0)), "SHORT": wav(tone(0.5))}
    if (sound := sounds.get(str(members.get("ref_audio")))) is not None:
        members = members | {"ref_audio": base64_of(sound)}
    await upload(gateway)
    response = await speak(gateway, **members)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert not gateway.scripts["talker"].requests


async def test_what_the_talker_refuses_has_the_request_s_name(gateway):
    await upload(gateway)
    for field, members, param in (
        ("text.voice_sample.samples", {"voice": "anna"}, "voice"),
        ("text.voice_sample.samples", {"ref_audio": base64_of(SAMPLE)}, "ref_audio"),
        ("text.voice_sample.text", {"ref_audio": base64_of(SAMPLE), "ref_text": "A"}, "ref_text"),
        ("text.whole_text_first", {"voice": "anna"}, "non_streaming_mode"),
        ("text.language", {"voice": "anna"}, "language"),
    ):
        gateway.scripts["talker"].error = InvalidInput(field, "no")
        response = await speak(gateway, **members)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_chat_is_answered_in_an_uploaded_voice(gateway):
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Hello."}], "modalities": ["audio"]}
    for audio in ({}, {"audio": {"voice": "bob"}}):
        status, error = await gateway.refusal(body | audio)
        assert (status, error["param"]) == (400, "audio.voice")
    await upload(gateway, ref_text="A tone.")
    response = await gateway.chat(body | {"audio": {"voice": "anna"}})
    assert response.status_code == 200, response.text
    (start,) = gateway.scripts["talker"].requests
    assert (start.text.text, start.text.voice_sample.text, len(heard(start))) == ("Hello.", "A tone.", 1.5 * RATE_HZ)
