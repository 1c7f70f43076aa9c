"""Word times are those of transformers' own model on the same weights, alone and together; what is refused, and how."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers

from cli.tiny import make_checkpoint
from quartet.v1 import aligner_pb2, aligner_pb2_grpc, server_info_pb2, server_info_pb2_grpc
from services.aligner.config import AlignerSettings
from services.aligner.family import RATE_HZ
from services.aligner.servicer import SERVICE_NAME, serve
from services.common.stage import Stage

pytestmark = pytest.mark.asyncio(loop_scope="module")
MOST_WORDS, MOST_AUDIO_S = 12, 8.0
TEXTS = {  # seconds of noise, and what is "said" in it
    1.3: "The sea is quiet.",
    6.7: "When the wind comes from the north -- the birds fly low!",
    3.0: "It's 12 o'clock, isn't it?",
    0.4: "Yes",
    4.4: "\u4f60\u597d, caf\u00e9 <timestamp>",
}


@dataclass
class Reference:
    """transformers' model and processor, as its documentation has them used."""

    model: Any
    processor: Any

    def times(self, pcm16: bytes, text: str) -> list[tuple[str, int, int]]:
        samples = np.frombuffer(pcm16, "<i2").astype(np.float32) / 32768
        inputs, words = self.processor.prepare_forced_aligner_inputs(audio=samples, transcript=text)
        with torch.inference_mode():
            logits = self.model(**{name: inputs[name] for name in inputs if name != "num_audio_tokens"}).logits
        mark = self.model.config.timestamp_token_id
        (found,) = self.processor.decode_forced_alignment(logits, inputs["input_ids"], words, mark)
        return [(each["text"], round(each["start_time"] * 1000), round(each["end_time"] * 1000)) for each in found]


@dataclass
class Served:
    stage: Stage
    stub: Any
    info: server_info_pb2.GetServerInfoResponse
    reference: Reference

    async def words(self, pcm16: bytes, text: str, language: str = "") -> Any:
        request = aligner_pb2.AlignRequest(request_id=f"r{id(pcm16)}", pcm16=pcm16, text=text, language=language)
        return (await self.stub.Align(request)).words

    async def refusal(self, **members: Any) -> str:
        fields = {"request_id": "r", "pcm16": noise(1.0), "text": "yes"} | members
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.stub.Align(aligner_pb2.AlignRequest(**fields))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return refused.value.details() or ""


def noise(seconds: float) -> bytes:
    drawn = np.random.default_rng(round(10 * seconds)).standard_normal(round(seconds * RATE_HZ))
    return (drawn.clip(-3, 3) * 3000).astype("<i2").tobytes()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("aligner"), 3, "tiny", "qwen3-aligner")
    settings = AlignerSettings(model=str(checkpoint), device="cpu", max_words=MOST_WORDS, max_audio_s=MOST_AUDIO_S)
    stage = Stage(settings, "aligner", SERVICE_NAME, streams=False)
    task = asyncio.create_task(serve(stage, settings))
    while not stage.has_served:
        await asyncio.sleep(0.02)
        if task.done():
            await task
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stage.port}") as channel:
        about: Any = server_info_pb2_grpc.ServerInfoServiceStub(channel)
        info = await about.GetServerInfo(server_info_pb2.GetServerInfoRequest())
        yield Served(stage, aligner_pb2_grpc.AlignerServiceStub(channel), info, reference(checkpoint))
    stage.request_stop()
    await task


def reference(checkpoint: Path) -> Reference:
    model = transformers.Qwen3ASRForTokenClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return Reference(model, transformers.AutoProcessor.from_pretrained(checkpoint))


async def test_it_says_what_it_takes(served: Served) -> None:
    facts = served.info.aligner
    assert (served.info.stage, served.info.dtype, served.info.device) == ("aligner", "float32", "cpu")
    assert (facts.max_audio_s, facts.max_words, facts.resolution_ms) == (MOST_AUDIO_S, MOST_WORDS, 80)
    assert {"en", "zh", "ja"} < set(facts.languages)


async def test_times_are_the_references_alone_and_together(served: Served) -> None:
    sounds = [(noise(seconds), text) for seconds, text in TEXTS.items()]
    expected = [served.reference.times(*sound) for sound in sounds]
    assert len({begin for words in expected for _, begin, _ in words}) > 3  # else nothing would be compared
    alone = [await served.words(*sound) for sound in sounds]
    together = await asyncio.gather(*(served.words(*sound) for sound in sounds))
    for each in (alone, together):
        assert [[(word.word, word.begin_ms, word.end_ms) for word in words] for words in each] == expected


async def test_words_have_their_place_in_the_text(served: Served) -> None:
    text = "It's 12 o'clock, isn't it? -- well-known \u4f60\u597d!"
    words = await served.words(noise(2.0), text)
    assert [text[word.text_begin : word.text_end] for word in words] == [
        *("It's", "12", "o'clock", "isn't", "it", "well-known", "\u4f60", "\u597d")
    ]
    assert [word.word for word in words][5] == "wellknown"  # as the reference reads it


async def test_a_text_without_words_has_none(served: Served) -> None:
    assert list(await served.words(noise(1.0), " -- ?! ")) == []


@pytest.mark.parametrize(
    ("members", "expected"),
    {
        "no sound": ({"pcm16": b""}, "pcm16: must be whole samples of 2 bytes, and at least one; has 0 bytes"),
        "half a sample": ({"pcm16": b"123"}, "pcm16: must be whole samples"),
        "a long sound": ({"pcm16": bytes(2 * 9 * RATE_HZ)}, "pcm16: must be at most 8 s; has 9.0 s: send it in pieces"),
        "many words": ({"text": "so " * 13}, "text: has 13 words; at most 12"),
        "many characters": ({"text": "a" * 400}, "text: has 400 characters; at most 384"),
        "a language": ({"language": "xx"}, "language: 'xx' is none that this model gives times for: zh"),
        "a splitter": ({"language": "ja"}, "language: the words of Japanese are found by the package nagisa"),
    }.values(),
    ids=lambda value: None,
)
async def test_what_it_refuses(served: Served, members: dict[str, Any], expected: str) -> None:
    assert (await served.refusal(**members)).startswith(expected)


async def test_a_cancelled_sound_stops_nobody(served: Served) -> None:
    calls = [asyncio.create_task(served.words(noise(6.7), TEXTS[6.7])) for _ in range(12)]
    await asyncio.sleep(0)
    for call in calls[:11]:
        call.cancel()
    words = await calls[11]
    assert len(words) == len(served.reference.times(noise(6.7), TEXTS[6.7]))
    while served.stage.admission.in_flight:
        await asyncio.sleep(0.01)
