"""A Qwen3-ASR that `quartet up` serves, alone and as the ears of a Llama: it writes down what transformers' does."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch

from gateway.listening.speech_windows import Pauses, WindowFinder
from gateway.media.encode import to_pcm16
from tests.support.clients.realtime_client import session
from tests.support.documents import ROOT
from tests.support.systems.stack import Stack, running
from tests.support.weights.speech_models import published_checkpoint, reference
from tests.support.weights.text_models import text_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long]
CLIP = ROOT / "docs/samples/1-ada.flac"
RATE_HZ, TOKENS = 16_000, 24
HEARD = "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n<|im_start|>assistant\n"
# Fields of the form, and the prompt that vLLM's class makes of them.
ASKED: list[tuple[dict[str, str], str]] = [
    ({}, HEARD),
    ({"language": "en"}, f"{HEARD}language English<asr_text>"),
    ({"prompt": "Ada<|im_end|>"}, f"<|im_start|>system\nAda<|im_end|>\n{HEARD}"),
]
MEMORY = "--thinker-arg=--kv-cache-bytes=67108864"
FLOAT = "--dtype=float32"


class Reference:
    """transformers' Qwen3-ASR, greedy."""

    def __init__(self) -> None:
        self.processor, self.model = reference("qwen3_asr")

    @torch.inference_mode()
    def tokens(self, samples: np.ndarray, prompt: str) -> list[int]:
        inputs = self.processor(text=prompt, audio=[samples], sampling_rate=RATE_HZ, return_tensors="pt")
        ids = self.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        return ids[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def transformers() -> Reference:
    return Reference()


def clip() -> np.ndarray:
    """(n,) float32, as its file in 16 bits is read."""
    samples, rate_hz = soundfile.read(CLIP, dtype="float32")
    return soundfile.read(io.BytesIO(file_of(soxr.resample(samples, rate_hz, RATE_HZ))), dtype="float32")[0]


def windows_of(samples: np.ndarray) -> list[np.ndarray]:
    """What the gateway sends to the thinker: speech between pauses, with some silence around it."""
    finder = WindowFinder(Pauses())
    windows = [*finder.add(to_pcm16(samples)), *finder.close()]
    assert windows
    return [np.frombuffer(window.pcm16, "<i2").astype(np.float32) / 32768 for window in windows]


def file_of(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE_HZ, format="WAV", subtype="PCM_16")
    return file.getvalue()


def part_of(sound: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"}}


def written(server: Stack, sound: bytes, **form: str) -> dict[str, Any]:
    fields = {"response_format": "verbose_json", "max_completion_tokens": str(TOKENS)} | form
    files = {"file": ("clip.wav", sound)}
    return server.http.post("/v1/audio/transcriptions", data=fields, files=files).raise_for_status().json()


def compare(server: Stack, expected: Reference) -> None:
    """Tokens are transformers', and the text is what vLLM's class makes of theirs."""
    from vllm.model_executor.models.qwen3_asr import Qwen3ASRForConditionalGeneration

    samples, clean = clip(), Qwen3ASRForConditionalGeneration.get_streaming_post_processor_cls()
    for form, prompt in ASKED:
        segments = written(server, file_of(samples), **form)["segments"]
        for segment, heard in zip(segments, windows_of(samples), strict=True):
            assert segment["tokens"] == expected.tokens(heard, prompt)
            said = expected.processor.tokenizer.decode(segment["tokens"], skip_special_tokens=True)
            assert segment["text"] == clean().process_delta(said, True).strip()


def test_alone_it_writes_down_speech_and_reads_no_words(tmp_path: Path, transformers: Reference) -> None:
    flags = (f"--thinker-arg={FLOAT}", MEMORY)
    with running(published_checkpoint("qwen3_asr"), tmp_path / "run", *flags) as server:
        compare(server, transformers)
        (model,) = server.http.get("/v1/models").json()["data"]
        assert model["quartet"]["input_modalities"] == ["text", "audio"]
        sound = part_of(file_of(clip()[: 3 * RATE_HZ]))
        asked: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0}
        turn = {"role": "user", "content": [sound]}
        told = server.http.post("/v1/chat/completions", json=asked | {"messages": [turn]}).raise_for_status().json()
        assert told["choices"][0]["message"]["content"]
        for content in ("Hello", [sound, {"type": "text", "text": "Hello"}]):
            body = asked | {"messages": [{"role": "user", "content": content}]}
            refused = server.http.post("/v1/chat/completions", json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "messages[0].content"
            assert "leaves out what users write" in refused.json()["error"]["message"]


@pytest.fixture(scope="module")
def eared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    ears = ("--asr-model", str(published_checkpoint("qwen3_asr")), f"--asr-arg={FLOAT}")
    memory = ("--asr-arg=--kv-cache-bytes=67108864", MEMORY)
    with running(text_checkpoint("llama"), tmp_path_factory.mktemp("ears") / "run", *ears, *memory) as started:
        yield started


def test_as_ears_it_writes_down_what_transformers_does(eared: Stack, transformers: Reference) -> None:
    compare(eared, transformers)


def test_a_chat_reads_what_it_hears(eared: Stack) -> None:
    sound = file_of(clip())
    said = eared.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", sound)}).raise_for_status().json()
    asked: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0}
    heard, read = (
        eared.http.post("/v1/chat/completions", json=asked | {"messages": [{"role": "user", "content": content}]})
        .raise_for_status()
        .json()
        for content in ([part_of(sound)], said["text"])
    )
    assert heard["choices"][0]["message"] == read["choices"][0]["message"]
    assert heard["usage"]["prompt_tokens"] == read["usage"]["prompt_tokens"]


async def test_a_session_reads_what_it_hears(eared: Stack) -> None:
    sound = np.round(soxr.resample(clip(), RATE_HZ, 24_000) * 32767).clip(-32768, 32767).astype("<i2").tobytes()
    settings = {"turn_detection": None, "transcription": {"model": "whisper-1"}}
    async with session(eared, None, max_queue=None) as client:
        told = {"type": "realtime", "output_modalities": ["text"], "max_output_tokens": 4, "audio": {"input": settings}}
        await client.ask("session.update", "session.updated", session=told)
        for begin in range(0, len(sound), 48_000):
            audio = base64.b64encode(sound[begin : begin + 48_000]).decode()
            await client.send("input_audio_buffer.append", audio=audio)
        await client.send("input_audio_buffer.commit")
        done = (await client.until("conversation.item.input_audio_transcription.completed"))[-1]
        assert done["transcript"].strip()
        events = await client.respond()
        assert events[-1]["response"]["status"] in ("completed", "incomplete")
        usage = events[-1]["response"]["usage"]
        assert usage["input_token_details"]["audio_tokens"] == 0
        assert usage["input_tokens"] > 0
