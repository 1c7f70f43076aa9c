"""A thinker that does not hear, and another model that writes down what is said."""

import base64
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import soxr

from gateway.media.encode import encode_audio
from services.common.errors import InternalError
from tests.support.clients.realtime_client import RealtimeClient, base64_of, session
from tests.support.samples.espeak import Recording, recording
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PIPELINE = """\
stages:
  thinker: {kind: thinker, address: 'h:1'}
  ears: {kind: thinker, address: 'h:2'}
outputs: {text: thinker, transcript: ears}
"""
SAID = "What is said."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory):
    file = tmp_path_factory.mktemp("ears") / "ears.yaml"
    file.write_text(PIPELINE)
    async with running(file) as gateway:
        gateway.stages.infos["thinker"].info.thinker.input_modalities[:] = ["image"]
        await gateway.publish_info("thinker")
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(started):
    started.scripts["ears"].pieces = [SAID]
    yield started
    await started.reset()


@pytest.fixture(scope="module")
def sentence() -> bytes:
    """PCM of 24 kHz."""
    return recording(2.0, [0.2]).pcm16_at(24_000)


async def say(client: RealtimeClient, sound: bytes) -> None:
    await client.send("input_audio_buffer.append", audio=base64_of(sound))
    await client.ask("input_audio_buffer.commit", "input_audio_buffer.committed")


async def manual(client: RealtimeClient, **members: object) -> None:
    audio = {"input": {"turn_detection": None, **members}}
    await client.ask("session.update", "session.updated", session={"audio": audio})


def texts(gateway: Running) -> list[list[str]]:
    """Of the messages of each request to the thinker."""
    return [
        [part.text for message in asked.messages for part in message.content]
        for asked in gateway.scripts["thinker"].requests
    ]


async def test_a_file_is_written_down_by_the_ears(gateway: Running, sentence: bytes) -> None:
    form = {"language": "German", "prompt": "Quartet", "response_format": "json"}
    sound = soxr.resample(np.frombuffer(sentence, "<i2"), 24_000, 8_000)
    wav = {"file": ("a.wav", _wav(sound))}
    response = await gateway.http.post("/v1/audio/transcriptions", data=form, files=wav)
    assert response.json()["text"] == SAID
    (asked,) = gateway.scripts["ears"].requests
    assert (asked.transcription.language, asked.transcription.hints, asked.transcription.translates) == (
        "de",
        "Quartet",
        False,
    )
    assert asked.transcription.sound.data.startswith(b"RIFF")
    assert not asked.messages
    assert (await gateway.http.post("/v1/audio/translations", files=wav)).json()["text"] == SAID
    assert gateway.scripts["ears"].requests[-1].transcription.translates
    assert gateway.scripts["thinker"].requests == []
    refused = await gateway.http.post("/v1/audio/transcriptions", data={"use_beam_search": "true", "n": "2"}, files=wav)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "use_beam_search")
    other = await gateway.http.post("/v1/audio/transcriptions", data={"model": "scripted"}, files=wav)
    assert (other.status_code, other.json()["error"]["param"]) == (400, "model")


async def test_what_is_said_is_answered(gateway: Running, sentence: bytes) -> None:
    """Each sound is written down once."""
    async with session(gateway) as client:
        await manual(client)
        for _ in range(2):
            await say(client, sentence)
            await client.send("response.create", response={"output_modalities": ["text"]})
            (*_, done) = await client.until("response.done")
            assert done["response"]["status"] == "completed"
    assert texts(gateway) == [[SAID], [SAID, SAID]]  # the answer between them is there by its ids
    assert len(gateway.scripts["ears"].requests) == 2


async def test_a_chat_is_answered_by_what_is_said_in_it(gateway: Running) -> None:
    """A sound that comes again is not written down again."""
    sounds = [_part(recording(seconds, [0.2])) for seconds in (1.0, 1.5)]
    turn = {"role": "user", "content": [{"type": "text", "text": "Listen:"}, sounds[0]]}
    body = {"messages": [turn]}
    answer = (await gateway.chat(body)).json()["choices"][0]["message"]["content"]
    body["messages"] += [{"role": "assistant", "content": answer}, {"role": "user", "content": sounds[::-1]}]
    assert (await gateway.chat(body)).status_code == 200
    assert texts(gateway) == [["Listen:", SAID], ["Listen:", SAID, answer, SAID, SAID]]
    assert len(gateway.scripts["ears"].requests) == 2
    tokens = await gateway.http.post("/tokenize", json={"messages": [turn]})
    assert tokens.status_code == 200
    assert texts(gateway)[-1] == ["Listen:", SAID]
    said = {"type": "message", "role": "user", "content": [sounds[1]]}
    assert (await gateway.http.post("/v1/responses", json={"input": [said]})).status_code == 200
    assert texts(gateway)[-1] == [SAID]
    assert len(gateway.scripts["ears"].requests) == 2


async def test_what_is_wrong_with_a_sound_of_a_chat_is_named(gateway: Running) -> None:
    sound = _part(recording(3.0, [0.2]))
    broken = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    status, error = await gateway.refusal({"messages": [{"role": "user", "content": [sound, broken]}]})
    assert (status, error["param"]) == (400, "messages[0].content[1]")
    gateway.scripts["ears"].error = InternalError("broken")
    body = {"messages": [{"role": "user", "content": [sound]}]}
    status, error = await gateway.refusal(body)
    assert (status, error["code"]) == (500, "internal_error")
    gateway.scripts["ears"].error = None
    assert (await gateway.chat(body)).status_code == 200


async def test_a_transcript_that_the_client_wants_serves_the_answer_too(gateway: Running, sentence: bytes) -> None:
    async with session(gateway) as client:
        await manual(client, transcription={"model": "whisper-1"})
        await say(client, sentence)
        await client.send("response.create", response={"output_modalities": ["text"]})
        events = await client.until("response.done")
        kind = "conversation.item.input_audio_transcription.completed"
        if not any(event["type"] == kind for event in events):
            events += await client.until(kind)
        (completed,) = (event for event in events if event["type"] == kind)
        assert completed["transcript"] == SAID
    assert texts(gateway) == [[SAID]]
    assert len(gateway.scripts["ears"].requests) == 1


async def test_ears_that_fail_end_the_answer_alone(gateway: Running, sentence: bytes) -> None:
    gateway.scripts["ears"].error = InternalError("broken")
    async with session(gateway) as client:
        await manual(client)
        await say(client, sentence)
        await client.send("response.create", response={"output_modalities": ["text"]})
        (*_, done) = await client.until("response.done")
        assert done["response"]["status_details"]["error"]["code"] == "internal_error"
        gateway.scripts["ears"].error = None
        await client.send("response.create", response={"output_modalities": ["text"]})
        (*_, done) = await client.until("response.done")
        assert done["response"]["status"] == "completed"
    assert texts(gateway) == [[SAID]]


async def test_both_models_have_names(gateway: Running) -> None:
    models = {each["id"]: each["quartet"] for each in (await gateway.http.get("/v1/models")).json()["data"]}
    assert list(models) == ["scripted", "scripted-ears"]
    assert (models["scripted"]["input_modalities"], models["scripted"]["output_modalities"]) == (
        ["text", "audio", "image"],
        ["text"],
    )
    ears = models["scripted-ears"]
    assert (ears["input_modalities"], ears["output_modalities"], ears["voices"]) == (["audio"], ["text"], [])
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert (await gateway.chat(body)).json()["choices"][0]["message"]["content"] == "".join(PIECES)
    assert gateway.scripts["ears"].requests == []
    status, error = await gateway.refusal(body | {"model": "scripted-ears"})
    assert (status, error["param"]) == (400, "model")


def _part(sound: Recording) -> dict[str, Any]:
    data = base64.b64encode(encode_audio(sound.pcm16_at(24_000), 24_000, "wav")).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def _wav(samples: np.ndarray) -> bytes:
    return encode_audio(samples.astype("<i2").tobytes(), 8_000, "wav")
