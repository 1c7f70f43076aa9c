"""The thinker's engine against transformers: hidden states of all positions, under everything vLLM does to a batch."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import pytest_asyncio
import torch

from services.common.errors import InvalidInput
from services.common.stream.rows import ROPE_POSITIONS, Rows, hidden_states
from services.sizes import kv_bytes
from services.thinker import environment
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, Cut, MediaFile, Message, RawPrompt
from services.thinker.execution import choices
from services.thinker.media import decode_audio, decode_image, decode_video
from services.thinker.plugin.rows import layers_of
from tests.support.references.thinker_engine import Answer, Reference
from tests.support.samples.media import mp4, png, wav
from tests.support.weights.checkpoints import omni_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
KV_BLOCK_TOKENS = 32
EVERYTHING = [(0, 2**40)]
GUARD_S = 120.0


@dataclass
class Result:
    """What a request gave; `rows` by name and position."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int = 0
    rows: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    repeated: int = 0

    def receive(self, shipped: Rows) -> None:
        rows = self.rows.setdefault(shipped.name, {})
        for i, row in enumerate(shipped.tensor, shipped.first_position):
            self.repeated += i in rows
            rows[i] = row.clone()


class Thinker:
    """An engine (real processes) with its preprocessor, and the reference on the same checkpoint."""

    def __init__(self, settings: ThinkerSettings, engine: Any, preprocessor: Any, reference: Reference) -> None:
        self.settings, self.engine, self.preprocessor, self.reference = settings, engine, preprocessor, reference

    async def run(self, conversation: Conversation, request_id: str = "r", lora: str = "", **sampling: Any) -> Result:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from services.thinker.engine import RowSubscription

        sampling = {"temperature": 0, "max_tokens": 10, "ignore_eos": True} | sampling
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **sampling)
        prompt = await self.preprocessor.prepare(conversation)
        result = Result(prompt.token_ids)
        names = [kind.name for kind in self.engine.row_kinds]
        rows = RowSubscription(dict.fromkeys(names, EVERYTHING), result.receive)
        with self.engine.adapters.use(lora) as adapter:
            async for step in self.engine.generate(request_id, prompt, params, rows, lora=adapter):
                result.token_ids += step.token_ids
                result.text += step.text
                result.finish_reason, result.cached_tokens = step.finish_reason, step.cached_tokens
        return result

    def expected(self, conversation: Conversation, max_tokens: int = 10) -> Answer:
        """The reference's answer, from the frames and samples that our decoders give."""
        rate, settings = self.engine.checkpoint.sample_rate_hz, self.settings
        media: dict[str, Any] = {}
        for file in conversation.media:
            if file.kind == "image":
                media.setdefault("images", []).append(decode_image(file, settings))
            elif file.kind == "audio":
                media.setdefault("audio", []).append(decode_audio(file, rate, settings))
            else:
                video = decode_video(file, rate, self.preprocessor.sample_frames, settings)
                media.setdefault("videos", []).append(video.frames)
                media["fps"] = settings.video_fps
                if conversation.use_audio_in_video:
                    media.setdefault("audio", []).append(video.sound)
                    media["use_audio_in_video"] = True
        prompt, first = self.engine.checkpoint.system_prompt, conversation.messages[0]
        system = [Message("system", [prompt])] if prompt and first.role != "system" else []
        turns = [
            {
                "role": message.role,
                "content": [
                    {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
                    for part in message.parts
                ],
            }
            for message in (*system, *conversation.messages)
        ]
        return self.reference.answer(turns, max_tokens, **media)

    def assert_equal(self, result: Result, expected: Answer) -> None:
        assert result.prompt_ids == expected.prompt_ids
        assert result.token_ids == expected.output_ids
        assert result.repeated == 0
        fed = len(result.prompt_ids) + len(result.token_ids) - 1  # the last token was never fed
        for layer in layers_of(self.engine.row_kinds):
            rows = result.rows[hidden_states(layer)]
            assert sorted(rows) == list(range(fed))
            torch.testing.assert_close(
                torch.stack([rows[i] for i in range(fed)]), expected.hidden_states[layer][:fed], atol=1e-4, rtol=0
            )
        rope = torch.stack([result.rows[ROPE_POSITIONS][i] for i in range(len(result.prompt_ids))])
        assert torch.equal(rope, expected.rope_positions)


async def start(checkpoint: Path, reference: Reference | None = None, **settings: Any) -> Thinker:
    options = {
        "dtype": "float32",
        "block_size": KV_BLOCK_TOKENS,
        "kv_cache_bytes": 48 << 20,
        "max_running_requests": 8,
        "max_context_tokens": 4096,
    }
    thinker_settings = ThinkerSettings(model=str(checkpoint), **(options | settings))
    environment.configure(thinker_settings)
    from services.thinker.engine import ThinkerEngine
    from services.thinker.preprocess import Preprocessor

    engine = await ThinkerEngine.start(thinker_settings)
    preprocessor = Preprocessor(thinker_settings, engine)
    return Thinker(thinker_settings, engine, preprocessor, reference or Reference(checkpoint))


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["qwen3-omni", pytest.param("qwen2.5-omni", marks=pytest.mark.long)]
)
async def thinker(request: pytest.FixtureRequest) -> AsyncIterator[Thinker]:
    # 64 tokens a step: every longer prompt is prefilled in chunks
    thinker = await start(omni_checkpoint(arch=request.param), max_batched_tokens=64)
    yield thinker
    await thinker.engine.close()
    thinker.preprocessor.close()


def vllm_metric(name: str) -> float:
    return sum(
        sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name
    )


def file(kind: Any, data: bytes) -> MediaFile:
    return MediaFile(kind, data, f"the {kind}")


def conversations() -> dict[str, Conversation]:
    image, sound = file("image", png()), file("audio", wav(1.3037))
    short_sound, video = file("audio", wav(0.7, 24000, 500.0)), file("video", mp4(2.0))
    return {
        "text": Conversation([Message("system", ["be brief"]), Message("user", ["hello the world " * 12])]),
        "chinese": Conversation([Message("user", ["你好，世界！今天天气怎么样？"])]),
        "image": Conversation([Message("user", [image, "what is this?"])]),
        "audio": Conversation([Message("user", [sound, "what was said?"])]),
        "image and audio": Conversation([Message("user", [image, short_sound, "both"])]),
        "two sounds": Conversation([Message("user", [short_sound, "and", sound])]),
        "video": Conversation([Message("user", [video, "what happens?"])]),
        "video with sound": Conversation([Message("user", [video, "and now?"])], use_audio_in_video=True),
        "turns with media": Conversation(
            [
                Message("user", [image, "first"]),
                Message("assistant", ["an answer"]),
                Message("user", [short_sound, "second"]),
            ]
        ),
    }


@pytest.mark.parametrize("name", list(conversations()))
async def test_states_of_all_positions_equal_transformers_cold_and_from_the_prefix_cache(
    thinker: Thinker, name: str
) -> None:
    conversation = conversations()[name]
    expected = thinker.expected(conversation)
    thinker.assert_equal(await thinker.run(conversation), expected)
    again = await thinker.run(conversation)
    thinker.assert_equal(again, expected)
    assert (again.cached_tokens > 0) == (len(again.prompt_ids) > KV_BLOCK_TOKENS)


async def test_the_engine_takes_the_path_that_is_told(thinker: Thinker) -> None:
    """With tests/interpreted_triton that is the one of a GPU (`make test-v2`)."""
    told = {choice.part: choice.path for choice in choices(thinker.settings, None, "float32")}
    config = thinker.engine._llm.vllm_config
    assert told["runner"] == ("V2" if config.use_v2_model_runner else "V1")
    assert (told["step"] == "eager") == config.model_config.enforce_eager


async def test_concurrent_requests_do_not_see_each_other(thinker: Thinker) -> None:
    cases = conversations()
    chosen = [cases[name] for name in ("text", "image and audio", "two sounds", "video with sound", "chinese", "audio")]
    results = await asyncio.gather(*(thinker.run(c, f"r{i}") for i, c in enumerate(chosen)))
    for conversation, result in zip(chosen, results, strict=True):
        thinker.assert_equal(result, thinker.expected(conversation))


@pytest.mark.parametrize("words", [0, 7, 15, 23, 31])
async def test_a_step_may_begin_and_end_anywhere_in_a_video_with_its_sound(thinker: Thinker, words: int) -> None:
    """Its frames and its sound take turns; of a step, one turn of each may be left."""
    turn = Message("user", ["to " * words, file("video", mp4(2.0)), "and now?"])
    conversation = Conversation([turn], use_audio_in_video=True)
    thinker.assert_equal(await thinker.run(conversation), thinker.expected(conversation))


async def test_a_long_video_with_its_sound_at_another_frame_rate_beside_an_image(
    thinker: Thinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    slower = thinker.settings.model_copy(update={"video_fps": 1.0})
    monkeypatch.setattr(thinker, "settings", slower)
    monkeypatch.setattr(thinker.preprocessor, "_settings", slower)
    turn = Message("user", [file("image", png()), "then", file("video", mp4(5.0)), "and now?"])
    conversation = Conversation([turn], use_audio_in_video=True)
    thinker.assert_equal(await thinker.run(conversation), thinker.expected(conversation))


async def test_only_the_asked_for_positions_are_shipped(thinker: Thinker) -> None:
    from vllm import SamplingParams

    from services.thinker.engine import RowSubscription

    prompt = await thinker.preprocessor.prepare(conversations()["image"])
    result = Result(prompt.token_ids)
    name = hidden_states(thinker.engine.checkpoint.accept_hidden_layer)
    rows = RowSubscription({name: prompt.multimodal}, result.receive)
    async for _ in thinker.engine.generate("r", prompt, SamplingParams(max_tokens=4, temperature=0), rows):
        pass
    assert list(result.rows) == [name]
    assert sorted(result.rows[name]) == [i for a, b in prompt.multimodal for i in range(a, b)]
    assert len(result.rows[name]) == prompt.image_tokens


async def test_a_grammar_is_compiled_once_and_off_the_event_loop(
    thinker: Thinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
    from vllm.v1.structured_output import backend_xgrammar

    original, compiled_in = backend_xgrammar.validate_xgrammar_grammar, list[int]()

    def compiled(params: SamplingParams) -> None:
        compiled_in.append(threading.get_ident())
        original(params)

    monkeypatch.setattr(backend_xgrammar, "validate_xgrammar_grammar", compiled)
    member = {"type": "object", "properties": {f"m{i}": {"type": "boolean"} for i in range(40)}}
    schema = {"type": "object", "properties": {f"p{i}": member for i in range(200)}}
    structure = StructuredOutputsParams(json=json.dumps(schema))
    options = {"structured_outputs": structure, "max_tokens": 4, "temperature": 0}
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, **options)
    checking = asyncio.create_task(thinker.engine.validate(params, "sampling.json_schema"))
    await asyncio.sleep(0)  # it has begun; what runs on the loop has run to its end
    assert not checking.done()
    await checking
    prompt = await thinker.preprocessor.prepare(conversations()["text"])
    text = "".join([step.text async for step in thinker.engine.generate("g", prompt, params)])
    assert text.startswith("{")
    (thread,) = compiled_in
    assert thread != threading.get_ident()


async def test_a_grammar_that_cannot_be_is_refused_and_names_its_field(thinker: Thinker) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(structured_outputs=StructuredOutputsParams(grammar="root ::= ("))
    with pytest.raises(InvalidInput, match=r"sampling\.grammar"):
        await thinker.engine.validate(params, "sampling.grammar")


async def test_a_long_prompt_is_cut_on_the_side_that_is_named(thinker: Thinker) -> None:
    messages, room = conversations()["text"].messages, thinker.engine.max_context_tokens - 1

    async def cut(*side: Any, prompt: Any = None) -> list[int]:
        conversation = Conversation([] if prompt else messages, raw=prompt, cut=Cut(*side) if side else None)
        return (await thinker.preprocessor.prepare(conversation)).token_ids

    whole = await cut()
    by_default = whole[-9:] if thinker.engine.checkpoint.tokenizer.truncation_side == "left" else whole[:9]
    assert await cut(9, True) == whole[-9:]
    assert await cut(9, False) == whole[:9]
    assert await cut(9) == by_default
    assert await cut(-1) == await cut(room) == await cut(len(whole)) == whole
    long = RawPrompt(token_ids=whole * (room // len(whole) + 1))
    assert await cut(-1, True, prompt=long) == long.token_ids[-room:]
    with pytest.raises(InvalidInput, match=f"at most {room}; -1") as caught:
        await cut(room + 1)
    assert caught.value.field == "truncate_prompt_tokens"


@pytest.mark.gpu
async def test_rows_from_cuda_graphs_equal_eager_ones(thinker: Thinker) -> None:
    """Cold, then from the prefix cache. A graph that kept anything of its capture gives other rows when it decodes."""
    assert not thinker.engine._llm.model_config.enforce_eager
    eager = await start(Path(thinker.settings.model), thinker.reference, compile="off")
    try:
        for name in ("text", "image and audio"):
            conversation = conversations()[name]
            for _ in range(2):
                expected = await eager.run(conversation, max_tokens=40)
                result = await thinker.run(conversation, max_tokens=40)
                assert result.token_ids == expected.token_ids
                assert result.rows.keys() == expected.rows.keys()
                for kind, rows in expected.rows.items():
                    assert sorted(result.rows[kind]) == sorted(rows)
                    for position, row in rows.items():
                        torch.testing.assert_close(result.rows[kind][position], row, atol=1e-3, rtol=0)
    finally:
        await eager.engine.close()
        eager.preprocessor.close()


async def test_an_aborted_request_leaves_nothing_behind(thinker: Thinker) -> None:
    cases = list(conversations().values())
    # half a minute of steps for each
    tasks = [asyncio.create_task(thinker.run(cases[i % 4], f"a{i}", max_tokens=3500)) for i in range(50)]
    async with asyncio.timeout(GUARD_S):
        while vllm_metric("vllm:num_requests_running") < 8:
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert len(thinker.engine.rows._deliveries) == 0
    conversation = conversations()["text"]
    thinker.assert_equal(await thinker.run(conversation), thinker.expected(conversation))
    assert vllm_metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.long  # an engine of its own
async def test_a_preempted_request_loses_and_repeats_no_row(thinker: Thinker) -> None:
    """The KV cache holds one of these requests whole, but not four: they are preempted and computed again."""
    text_config = thinker.reference.thinker.config.text_config
    token_bytes = kv_bytes(text_config.to_dict(), 4)
    small = await start(
        Path(thinker.settings.model),
        thinker.reference,
        kv_cache_bytes=9 * KV_BLOCK_TOKENS * token_bytes,
        max_context_tokens=256,
        enable_prefix_caching=False,
    )
    try:
        cases = [Conversation([Message("user", [f"{word} the world"])]) for word in ("one", "two", "three", "four")]
        vllm = small.engine._llm
        await vllm.pause_generation(mode="keep")  # until all four are there
        running = [asyncio.create_task(small.run(c, f"p{i}", max_tokens=90)) for i, c in enumerate(cases)]
        async with asyncio.timeout(GUARD_S):
            while vllm.output_processor.get_num_unfinished_requests() < len(cases):
                await asyncio.sleep(0.01)
        await vllm.resume_generation()
        results = await asyncio.gather(*running)
        assert vllm_metric("vllm:num_preemptions_total") > 0
        for conversation, result in zip(cases, results, strict=True):
            small.assert_equal(result, small.expected(conversation, 90))
    finally:
        await small.engine.close()
        small.preprocessor.close()
