"""A Whisper that `quartet up` serves: it writes down what transformers' Whisper does, and answers nothing."""

import asyncio
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import soundfile
import soxr
import torch
import transformers

from quartet.v1 import media_pb2, thinker_pb2, thinker_pb2_grpc
from tests.support.documents import ROOT
from tests.support.samples.media import wav
from tests.support.stage.streaming import CHANNELS
from tests.support.systems.stack import Stack, free_port, running, until
from tests.support.systems.terminal import Terminal, lines
from tests.support.weights.text_models import text_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long]
RATE_HZ, TOKENS = 16_000, 16
CLIP = ROOT / "docs/samples/1-ada.flac"
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ("--thinker-arg=--dtype=float32", "--thinker-arg=--kv-cache-bytes=67108864")
    with running(text_checkpoint("whisper"), tmp_path_factory.mktemp("whisper") / "run", *flags) as started:
        yield started


class Reference:
    """transformers' Whisper, greedy."""

    def __init__(self) -> None:
        checkpoint = text_checkpoint("whisper")
        self.processor: Any = transformers.WhisperProcessor.from_pretrained(checkpoint)
        self.model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        self.model.eval()

    def ids(self, text: str) -> list[int]:
        return self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.inference_mode()
    def tokens(self, samples: np.ndarray, prompt: Sequence[int], count: int = TOKENS) -> list[int]:
        """`count` tokens after `prompt` of (n) float32."""
        features = self.processor.feature_extractor(samples, sampling_rate=RATE_HZ, return_tensors="pt").input_features
        encoded = self.model.get_encoder()(features)
        ids = torch.tensor([list(prompt)])
        for _ in range(count):
            logits = self.model(encoder_outputs=encoded, decoder_input_ids=ids).logits[0, -1]
            ids = torch.cat([ids, logits.argmax()[None, None]], dim=1)
        return ids[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def language(self, samples: np.ndarray, codes: Sequence[str]) -> str:
        features = self.processor.feature_extractor(samples, sampling_rate=RATE_HZ, return_tensors="pt").input_features
        start = torch.tensor([self.ids("<|startoftranscript|>")])
        logits = self.model(features, decoder_input_ids=start).logits[0, -1]
        tokens = [self.ids(f"<|{code}|>")[0] for code in codes]
        return codes[int(logits[tokens].argmax())]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def clip() -> np.ndarray:
    """(n,) float32 in 16 bits."""
    samples, rate_hz = soundfile.read(CLIP, dtype="float32")
    wave = np.round(soxr.resample(samples, rate_hz, RATE_HZ) * 32767).clip(-32768, 32767)
    return (wave / 32768).astype(np.float32)


def file_of(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE_HZ, format="WAV", subtype="PCM_16")
    return file.getvalue()


async def written(server: Stack, sound: bytes, **asked: Any) -> list[int]:
    """Token ids of a transcription over gRPC."""
    media = media_pb2.Media(kind=media_pb2.MEDIA_KIND_AUDIO, data=sound)
    start = thinker_pb2.GenerateStart(
        request_id=f"r{next(_NUMBERS)}",
        transcription=thinker_pb2.Transcription(sound=media, **asked),
        sampling=thinker_pb2.SamplingParameters(temperature=0, max_tokens=TOKENS, ignore_eos=True),
    )
    return await _generate(server, start)


async def _generate(server: Stack, start: thinker_pb2.GenerateStart) -> list[int]:
    ids = list[int]()
    stub = thinker_pb2_grpc.ThinkerServiceStub(CHANNELS.channel(server.addresses["thinker"]))
    async for response in stub.Generate(iter([thinker_pb2.GenerateRequest(start=start)])):
        ids += response.delta.token_ids
    return ids


async def test_tokens_are_those_of_transformers(server: Stack, reference: Reference) -> None:
    """Together, in several languages and tasks, with and without hints."""
    samples = clip()[: 4 * RATE_HZ]
    tone = soundfile.read(io.BytesIO(wav(2.0, RATE_HZ)), dtype="float32")[0]
    cases: list[tuple[np.ndarray, dict[str, Any], str]] = [
        (samples, {"language": "en"}, "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"),
        (tone, {"language": "de", "translates": True}, "<|startoftranscript|><|de|><|translate|><|notimestamps|>"),
        (
            samples,
            {"language": "fr", "hints": "The <|en|>king<|endoftext|>"},
            "<|startofprev|> The  king<|startoftranscript|><|fr|><|transcribe|><|notimestamps|>",
        ),
    ]
    async with server.stages_reached():
        found = await asyncio.gather(*(written(server, file_of(sound), **asked) for sound, asked, _ in cases))
    for ids, (sound, _, prompt) in zip(found, cases, strict=True):
        assert ids == reference.tokens(sound, reference.ids(prompt)), prompt


async def test_the_language_is_heard(server: Stack, reference: Reference) -> None:
    from vllm.model_executor.models.whisper_utils import ISO639_1_SUPPORTED_LANGS

    samples = clip()[: 3 * RATE_HZ]
    language = reference.language(samples, list(ISO639_1_SUPPORTED_LANGS))
    prompt = f"<|startoftranscript|><|{language}|><|transcribe|><|notimestamps|>"
    async with server.stages_reached():
        assert await written(server, file_of(samples)) == reference.tokens(samples, reference.ids(prompt))


def test_a_file_is_written_down_over_http(server: Stack, reference: Reference) -> None:
    samples, form = clip(), {"response_format": "verbose_json", "language": "en", "max_completion_tokens": str(TOKENS)}
    files = {"file": ("clip.wav", file_of(samples))}
    body = server.http.post("/v1/audio/transcriptions", data=form, files=files).raise_for_status().json()
    assert body["segments"]
    prompt = reference.ids("<|startoftranscript|><|en|><|transcribe|><|notimestamps|>")
    for segment in body["segments"]:
        begin, end = (round(segment[name] * RATE_HZ) for name in ("start", "end"))
        ids = segment["tokens"]
        expected = reference.tokens(samples[begin:end], prompt)
        assert ids == expected[: len(ids)]
        assert len(ids) == TOKENS or ids[-1] == reference.processor.tokenizer.eos_token_id
    assert server.http.post("/v1/audio/translations", files=files).status_code == 200


def test_it_is_a_model_that_hears_and_writes(server: Stack) -> None:
    (model,) = server.http.get("/v1/models").json()["data"]
    facts = model["quartet"]
    assert (facts["input_modalities"], facts["output_modalities"]) == (["audio"], ["text"])
    assert facts["max_context_tokens"] == 448


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/audio/speech", {"input": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
def test_it_answers_nothing(server: Stack, path: str, body: dict[str, Any]) -> None:
    refused = server.http.post(path, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "unsupported_model")
    assert re.search("this server (makes: transcript|has no model that writes)", error["message"])


async def test_what_it_cannot_write_down_is_refused_by_name(server: Stack) -> None:
    async def refused(start: thinker_pb2.GenerateStart) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await _generate(server, start)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        return error.value.details() or ""

    def asked(sound: bytes, **more: Any) -> thinker_pb2.GenerateStart:
        media = media_pb2.Media(kind=media_pb2.MEDIA_KIND_AUDIO, data=sound)
        spoken = thinker_pb2.Transcription(sound=media, **more)
        return thinker_pb2.GenerateStart(request_id=f"r{next(_NUMBERS)}", transcription=spoken)

    hello = thinker_pb2.ChatMessage(role="user", content=[thinker_pb2.ContentPart(text="Hi")])
    beside = asked(wav(1.0, RATE_HZ))
    beside.messages.append(hello)
    async with server.stages_reached():
        assert "writes down speech, and answers nothing" in await refused(
            thinker_pb2.GenerateStart(request_id="chat", messages=[hello])
        )
        unknown = asked(wav(1.0, RATE_HZ), language="xx")
        assert "transcription.language: is 'xx'; this model knows" in await refused(unknown)
        long = asked(wav(1.0, RATE_HZ), language="en", hints="a" * 4097)
        assert "transcription.hints: has 4097 characters" in await refused(long)
        assert "30 s that the model hears at a time" in await refused(asked(wav(31.0, RATE_HZ), language="en"))
        assert "cannot be beside a transcription" in await refused(beside)
        assert await written(server, wav(1.0, RATE_HZ), language="en")


async def test_who_leaves_frees_its_place(server: Stack) -> None:
    media = media_pb2.Media(kind=media_pb2.MEDIA_KIND_AUDIO, data=wav(2.0, RATE_HZ))
    start = thinker_pb2.GenerateStart(
        request_id="endless",
        transcription=thinker_pb2.Transcription(sound=media, language="en"),
        sampling=thinker_pb2.SamplingParameters(temperature=0, max_tokens=400, ignore_eos=True),
    )
    async with server.stages_reached():
        stub = thinker_pb2_grpc.ThinkerServiceStub(CHANNELS.channel(server.addresses["thinker"]))
        call = stub.Generate(iter([thinker_pb2.GenerateRequest(start=start)]))
        async for response in call:
            if response.delta.token_ids:
                break
        call.cancel()
    until(lambda: not any(server.in_flight().values()), "the thinker is free")


def test_the_documents_lines(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    said = {
        "quartet up --model openai/whisper-small": f"quartet up --model {text_checkpoint('whisper')} --port {port}",
        "quartet transcribe talk.mp4": f"quartet transcribe --url {url} {CLIP.resolve()}",
        "quartet ": ".venv/bin/quartet ",
    }
    typist = Terminal(tmp_path, said, {})
    page = [line for line in lines("docs/any-model.md") if "--asr-model" not in line]
    up, hears = (line for line in page if "whisper" in line or "transcribe" in line)
    with typist.served(up, "ready after"):
        assert typist.type(hears).strip()
