"""A Whisper writes down speech, a Llama answers it, and a Qwen3-TTS speaks that, as docs/any-model.md starts them."""

import base64
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.plan import ASR_VOICED_PIPELINE
from gateway.pipeline.speakable_text import SpeakableText
from tests.support.clients.realtime_client import session
from tests.support.clients.speech import ENDLESS_SPEECH
from tests.support.documents import ROOT
from tests.support.systems.stack import Stack, brief_pipeline, free_port, running, until
from tests.support.systems.terminal import Terminal
from tests.support.systems.terminal import lines as commands_of
from tests.support.weights.checkpoints import tts_checkpoint
from tests.support.weights.text_models import text_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long]
CLIP = ROOT / "docs/samples/1-ada.flac"
FRAMES = 40
QUESTION = [{"role": "user", "content": "Which day comes after Monday?"}]
GREEDY = {"temperature": 0, "max_tokens": 24}
BRIEF = {"talker": {"temperature": 0, "max_frames": FRAMES}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("voice")
    others = ("--asr-model", str(text_checkpoint("whisper")), "--talker-model", str(tts_checkpoint("qwen3-tts")))
    memory = (f"--{part}-arg=--kv-cache-bytes=67108864" for part in ("asr", "thinker"))
    with running(text_checkpoint("llama"), home / "run", *others, *memory) as started:
        yield started


def ask(server: Stack, **fields: Any) -> dict[str, Any]:
    body = {"messages": QUESTION, "modalities": ["text", "audio"], "audio": {"format": "pcm16"}, **GREEDY, **fields}
    response = server.http.post("/v1/chat/completions", json={"quartet": BRIEF, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_the_answer_is_the_llms_and_its_sound_the_voices_own(server: Stack) -> None:
    """The thinker's tokens are compared with transformers' in tests/long/test_any_model.py, the voice's codes and sound
    with qwen-tts' in tests/stage and test_qwen3_tts.py."""
    written, voice, _ = (model["id"] for model in server.http.get("/v1/models").json()["data"])
    silent = ask(server, modalities=["text"])["choices"][0]["message"]["content"]
    body = ask(server, model=written, audio={"format": "pcm16", "voice": "ryan"})
    audio = body["choices"][0]["message"]["audio"]
    assert audio["transcript"] == silent
    speakable = SpeakableText()
    said = speakable.add(silent) + speakable.close()
    speech = {"model": voice, "input": said, "voice": "ryan", "response_format": "pcm", "quartet": BRIEF}
    alone = server.http.post("/v1/audio/speech", json=speech | {"non_streaming_mode": False}).raise_for_status().content
    assert len(alone) == FRAMES * 1920 * 2
    heard, expected = (np.frombuffer(sound, "<i2").astype(int) for sound in (base64.b64decode(audio["data"]), alone))
    np.testing.assert_allclose(heard, expected, rtol=0, atol=1)  # a step of 16 bits, however the sound was cut
    assert body["usage"]["completion_tokens_details"]["audio_tokens"] == FRAMES


def test_what_is_heard_is_answered_as_what_is_written(server: Stack) -> None:
    """The transcript's tokens are compared with transformers' in tests/long/test_transcriber.py."""
    sound = {"data": base64.b64encode(CLIP.read_bytes()).decode(), "format": "flac"}
    files = {"file": ("a.flac", CLIP.read_bytes())}
    said = server.http.post("/v1/audio/transcriptions", files=files).raise_for_status().json()["text"]
    assert said
    heard = ask(server, messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}])
    read = ask(server, messages=[{"role": "user", "content": said}])
    ours, theirs = (body["choices"][0]["message"]["audio"] for body in (heard, read))
    assert ours["transcript"] == theirs["transcript"]
    pcm = (np.frombuffer(base64.b64decode(each["data"]), "<i2").astype(int) for each in (ours, theirs))
    np.testing.assert_allclose(*pcm, rtol=0, atol=1)
    assert heard["usage"]["prompt_tokens"] == read["usage"]["prompt_tokens"]


def test_who_leaves_frees_all_stages(server: Stack) -> None:
    body = {"messages": QUESTION, "modalities": ["text", "audio"], "stream": True, "ignore_eos": True}
    endless = {"max_tokens": 300, "temperature": 1, "seed": 3, "quartet": {"talker": ENDLESS_SPEECH}}
    with server.http.stream("POST", "/v1/chat/completions", json=body | endless) as response:
        lines = response.iter_lines()
        assert any('"modality":"audio"' in line.replace(" ", "") for line in lines)
        assert response.status_code == 200
        assert server.in_flight()["talker"] == 1
    until(lambda: not any(server.in_flight().values()), "all stages are free")


async def test_a_voice_that_dies_is_an_error_and_the_session_goes_on(server: Stack) -> None:
    async with session(server, None, max_queue=None) as client:
        endless = {"type": "realtime", "output_modalities": ["audio"], "max_output_tokens": 3000}
        await client.ask("session.update", "session.updated", session=endless)
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on and on."}]}
        await client.send("conversation.item.create", item=item)
        await client.send("response.create")
        await client.until("response.output_audio.delta")
        talker = server.pid("talker")
        os.kill(talker, signal.SIGKILL)
        killed = time.monotonic()
        *_, done = await client.until("response.done")
        print(f"the error came {time.monotonic() - killed:.2f} s after the kill")
        assert done["response"]["status"] == "failed"
        assert done["response"]["status_details"]["error"]["code"] == "stage_unavailable"
        until(lambda: server.pid("talker") != talker and server.ready(), "the talker is back")
        await client.send("response.create", response={"max_output_tokens": 8})
        events = await client.until("response.done")
        assert events[-1]["response"]["status"] in ("completed", "incomplete")
        pieces = [event["delta"] for event in events if event["type"] == "response.output_audio.delta"]
        assert np.frombuffer(b"".join(map(base64.b64decode, pieces)), "<i2").any()


@pytest.mark.weekly  # it starts a system for two lines
def test_the_documents_lines(tmp_path: Path) -> None:
    port = free_port()
    said = {
        "meta-llama/Llama-3.1-8B-Instruct": f"{text_checkpoint('llama')} --port {port}",
        "openai/whisper-small": str(text_checkpoint("whisper")),
        "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice": str(tts_checkpoint("qwen3-tts")),
        "quartet chat": f"quartet chat --url http://127.0.0.1:{port} --max-tokens 12",
        "quartet ": ".venv/bin/quartet ",
    }
    typist = Terminal(tmp_path, said, {})
    page = commands_of("docs/any-model.md")
    up, asks = (line for line in page if "--talker-model" in line or "--out answer.wav" in line)
    pipeline = brief_pipeline(tmp_path, ASR_VOICED_PIPELINE)
    with typist.served(f"{up} --pipeline {pipeline}", "ready after"):
        assert typist.type(asks).strip()
    assert (tmp_path / "answer.wav").stat().st_size > 44
