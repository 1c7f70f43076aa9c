"""A speech server of Qwen3-TTS as users run it: it speaks in an uploaded voice what the package qwen-tts speaks."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import websockets

from tests.support.clients.speech import ENDLESS_SPEECH
from tests.support.clients.voices import base64_of, wav
from tests.support.references.qwen_tts import load_tts
from tests.support.samples.voice import RATE_HZ, voice_like
from tests.support.systems.stack import Stack, running, until
from tests.support.weights.checkpoints import tts_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long]
FRAMES = 20
TEXT = "The boats are out, and nobody waits for them."
SAID = "I said this."
GREEDY = {"talker": {"temperature": 0, "max_frames": FRAMES}}
STEP_PCM16 = 1 / 32768


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("tts")
    voices = f"--gateway-arg=--voices-dir={home / 'voices'}"
    with running(tts_checkpoint("qwen3-tts-base"), home / "run", voices) as started:
        yield started


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    """(samples,) float32, exact in 16 bits."""
    return np.round(voice_like(2.0).numpy() * 32767).astype("<i2").astype(np.float32) / 32768


@pytest.fixture(scope="module")
def voice(server: Stack, sample: np.ndarray) -> str:
    """Id of an uploaded one."""
    form = {"name": "anna", "consent": "Anna agreed on 3 May", "ref_text": SAID}
    files = {"audio_sample": ("anna.wav", wav(sample, RATE_HZ))}
    response = server.http.post("/v1/audio/voices", data=form, files=files).raise_for_status()
    return response.json()["id"]


def _speak(server: Stack, **fields: object) -> np.ndarray:
    """(samples,) float64 of TEXT."""
    body = {"model": server.model, "input": TEXT, "response_format": "pcm", "quartet": GREEDY, **fields}
    response = server.http.post("/v1/audio/speech", json=body)
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content, "<i2") / 32768


def test_a_cloned_voice_sounds_as_in_the_reference(server: Stack, voice: str, sample: np.ndarray) -> None:
    """With the text of the sample and without it: the sample's frames are decoded and not heard."""
    reference = load_tts(tts_checkpoint("qwen3-tts-base"))
    greedy = {"do_sample": False, "subtalker_dosample": False, "max_new_tokens": FRAMES + 1}
    given = {"ref_audio": f"data:audio/wav;base64,{base64_of(wav(sample, RATE_HZ))}"}
    for said, forms in (
        (SAID, ({"voice": voice}, {"voice": "anna", "language": "English"}, {**given, "ref_text": SAID})),
        (None, ({"voice": voice, "x_vector_only_mode": True}, {**given, "non_streaming_mode": True})),
    ):
        for fields in forms:
            (expected,), _ = reference.generate_voice_clone(
                TEXT,
                language=fields.get("language"),
                ref_audio=(sample, RATE_HZ),
                ref_text=said,
                x_vector_only_mode=said is None,
                non_streaming_mode=fields.get("non_streaming_mode", False),
                **greedy,
            )
            heard = _speak(server, **fields)
            assert len(heard) == len(expected) == FRAMES * 1920
            np.testing.assert_allclose(heard, expected, rtol=0, atol=1e-4 + STEP_PCM16)


async def test_typed_text_is_spoken_in_the_uploaded_voice(server: Stack, voice: str) -> None:
    url = f"{server.url.replace('http', 'ws', 1)}/v1/audio/speech/stream"
    settings = {"model": server.model, "voice": voice, "response_format": "pcm", "quartet": GREEDY}
    heard = b""
    async with asyncio.timeout(60), websockets.connect(url) as socket:
        await socket.send(json.dumps({"type": "session.config", **settings}))
        for piece in TEXT.split(" "):
            await socket.send(json.dumps({"type": "input.text", "text": f"{piece} "}))
        await socket.send(json.dumps({"type": "input.done"}))
        async for message in socket:
            if isinstance(message, bytes):
                heard += message
            elif json.loads(message)["type"] == "session.done":
                break
    whole = await asyncio.to_thread(_speak, server, voice=voice)
    np.testing.assert_allclose(np.frombuffer(heard, "<i2") / 32768, whole, rtol=0, atol=STEP_PCM16)


def test_who_leaves_frees_both_stages(server: Stack, voice: str) -> None:
    options = {"voice": voice, "response_format": "pcm", "quartet": {"talker": ENDLESS_SPEECH}}
    body = {"model": server.model, "input": TEXT * 20, **options}
    with server.http.stream("POST", "/v1/audio/speech", json=body) as response:
        pieces = response.iter_raw()
        assert next(pieces)
        assert server.in_flight()["talker"] == 1
    until(lambda: not any(server.in_flight().values()), "all stages are free")


def test_what_it_cannot_do_is_refused(server: Stack) -> None:
    def refused(path: str, body: dict) -> tuple[int, str | None]:
        response: httpx.Response = server.http.post(path, json={"model": server.model, **body})
        return response.status_code, response.json()["error"]["param"]

    assert refused("/v1/audio/speech", {"input": TEXT}) == (400, "voice")
    assert refused("/v1/audio/speech", {"input": TEXT, "voice": "nobody"}) == (400, "voice")
    assert refused("/v1/audio/speech", {"input": TEXT, "voice": "anna", "instructions": "Calmly."}) == (
        400,
        "instructions",
    )
