"""`quartet wyoming` as Home Assistant uses it, before a whole system."""

import time
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from wyoming.asr import Transcribe
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop, SynthesizeVoice

from tests.support.clients.wyoming_client import WyomingServer, pcm, recorded, types, wyoming_server
from tests.support.systems.stack import until

pytestmark = pytest.mark.e2e
QUESTION = Path(__file__).parents[2] / "cli" / "assets" / "question.wav"
TEXT = "The boats are out."
CHELSIE = SynthesizeVoice(name="Chelsie")
INFO_TIMEOUT_S = 1.0  # Home Assistant's


@pytest.fixture(scope="module")
def server(stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WyomingServer]:
    flags = ("--api-key", stack.key, "--language", "en")
    with wyoming_server(tmp_path_factory.mktemp("wyoming"), stack.url, *flags) as started:
        yield started


async def test_it_says_what_it_can(stack, server):
    async with server.connected() as client:
        began = time.monotonic()
        info = await client.info()
        took_s = time.monotonic() - began
    assert took_s < INFO_TIMEOUT_S
    (asr,), (tts,) = info.asr, info.tts
    assert [(model.name, model.languages) for model in asr.models] == [(stack.model, ["en"])]
    names = [voice["name"] for voice in stack.http.get("/v1/audio/voices").json()["voices"]]
    assert [(voice.name, voice.languages) for voice in tts.voices] == [(name, ["en"]) for name in names]
    assert asr.installed
    assert tts.installed
    assert asr.supports_transcript_streaming
    assert tts.supports_synthesize_streaming


async def test_speech_is_written_down(server):
    with wave.open(str(QUESTION)) as opened:
        sound = opened.readframes(opened.getnframes())
        question = recorded(opened.getframerate(), opened.getsampwidth(), opened.getnchannels(), sound)
    async with server.connected() as client:
        await client.send(Transcribe(language="en"), *question)
        events = await client.until("transcript-stop")
    assert types(events) == ["transcript-start", "transcript-chunk", "transcript", "transcript-stop"]
    chunks = [event.data["text"] for event in events if event.type == "transcript-chunk"]
    assert "".join(chunks).strip() == events[-2].data["text"].strip() != ""


async def test_a_text_is_spoken(server):
    async with server.connected() as client:
        await client.send(Synthesize(TEXT, voice=CHELSIE))
        events = await client.until("audio-stop")
    assert types(events) == ["audio-start", "audio-chunk", "audio-stop"]
    assert {name: events[0].data[name] for name in ("rate", "width", "channels")} == {
        "rate": 24_000,
        "width": 2,
        "channels": 1,
    }
    assert np.abs(np.frombuffer(pcm(events), "<i2").astype(int)).max() > 100


async def test_speech_begins_before_its_text_ends(server):
    async with server.connected() as client:
        await client.send(SynthesizeStart(voice=CHELSIE), SynthesizeChunk("The boats are out, and nobody "))
        first = await client.until("audio-chunk")
        await client.send(SynthesizeChunk("waits for them."), Synthesize("ignored", voice=CHELSIE), SynthesizeStop())
        events = first + await client.until("synthesize-stopped")
    assert types(events) == ["audio-start", "audio-chunk", "audio-stop", "synthesize-stopped"]
    assert len(pcm(events)) > len(pcm(first))


async def test_an_error_is_the_gateways_and_the_next_request_is_answered(stack, server):
    wrong = {"model": stack.model, "input": TEXT, "voice": "nobody"}
    said = stack.http.post("/v1/audio/speech", json=wrong).json()["error"]
    async with server.connected() as client:
        await client.send(Synthesize(TEXT, voice=SynthesizeVoice(name="nobody")))
        error, end = await client.until("audio-stop")
        assert (error.type, error.data) == ("error", {"text": said["message"], "code": said["code"]})
        assert end.type == "audio-stop"
        await client.send(SynthesizeStart(voice=SynthesizeVoice(name="nobody")), SynthesizeChunk(TEXT))
        error, end = await client.until("synthesize-stopped")
        assert (error.type, error.data) == ("error", {"text": said["message"], "code": said["code"]})
        await client.send(SynthesizeStop(), Synthesize(TEXT, voice=CHELSIE))
        assert types(await client.until("audio-stop")) == ["audio-start", "audio-chunk", "audio-stop"]


async def test_a_client_that_leaves_in_mid_sound_frees_every_stage(stack, server):
    cancelled = stack.cancelled("talker")
    async with server.connected() as client:
        await client.send(SynthesizeStart(voice=CHELSIE), SynthesizeChunk("The boats are out, and nobody "))
        await client.until("audio-chunk")
        assert stack.in_flight()["talker"] == 1  # it waits for more text
    until(lambda: not any(stack.in_flight().values()), "all stages are free")
    assert stack.cancelled("talker") == cancelled + 1
