"""The thinker's engine against transformers: hidden states of all positions, under everything vLLM does to a batch."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import pytest_asyncio
import torch
from PIL import Image

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput, TooManyLogprobs
from services.common.rpc.call import Call
from services.common.sampling_limits import BACKGROUND_PRIORITY, MAX_LOGPROBS
from services.common.stream.rows import ROPE_POSITIONS, Rows, hidden_states
from services.sizes import kv_bytes
from services.thinker import environment
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, Cut, FrameChoice, MediaFile, Message, RawPrompt
from services.thinker.execution import choices
from services.thinker.generation import Generation
from services.thinker.media import decode_audio, decode_image, decode_video
from services.thinker.plugin.rows import layers_of
from tests.support.kept import kept_value
from tests.support.references.thinker_engine import Answer, Reference
from tests.support.samples.media import mp4, png, wav
from tests.support.scripted.preprocessing import decoders
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

    async def run(
        self,
        conversation: Conversation,
        request_id: str = "r",
        lora: str = "",
        priority: int = 0,
        seen: list[int] | None = None,
        **sampling: Any,
    ) -> Result:
        """`seen` gets the tokens as they come."""
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
            async for step in self.engine.generate(request_id, prompt, params, rows, priority=priority, lora=adapter):
                result.token_ids += step.token_ids
                if seen is not None:
                    seen += step.token_ids
                result.text += step.text
                result.finish_reason, result.cached_tokens = step.finish_reason, step.cached_tokens
        return result

    def expected(self, conversation: Conversation, max_tokens: int = 10, fps: float = 0.0) -> Answer:
        """The reference's answer, from the frames and samples that our decoders give. `fps`: not the settings'."""
        sampler = partial(self.preprocessor.sample_frames, choice=conversation.frames)
        rate, settings = self.engine.checkpoint.sample_rate_hz, self.settings
        media: dict[str, Any] = {}
        for file in conversation.media:
            if file.kind == "image":
                media.setdefault("images", []).append(Image.fromarray(decode_image(file, settings)))
            elif file.kind == "audio":
                media.setdefault("audio", []).append(decode_audio(file, rate, settings))
            else:
                video = decode_video(file, rate, sampler, settings)
                media.setdefault("videos", []).append(video.frames)
                media["fps"] = fps or settings.video_fps
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
    preprocessor = Preprocessor(thinker_settings, engine, decoders())
    return Thinker(thinker_settings, engine, preprocessor, reference or Reference(checkpoint))


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["qwen3-omni", pytest.param("qwen2.5-omni", marks=pytest.mark.long)]
)
async def thinker(request: pytest.FixtureRequest) -> AsyncIterator[Thinker]:
    # 64 tokens a step: every longer prompt is prefilled in chunks
    settings = {"max_batched_tokens": 64, "prompt_logprobs": True, "vocabulary_logprobs": True}
    thinker = await start(omni_checkpoint(arch=request.param), **settings)
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


async def test_a_request_in_the_background_lets_others_go_first(thinker: Thinker) -> None:
    """One that is written and one that is to be read: each is in few of the steps, and comes to what it would alone.
    While another is announced, but does not come, there is a step a second."""
    texts, lengths = ("hello the world " * 12, "one the world", "two the world " * 9), (240, 48, 40)
    cases = [Conversation([Message("user", [text])]) for text in texts]
    written: list[list[int]] = [[], [], []]

    def begin(i: int, priority: int = BACKGROUND_PRIORITY) -> asyncio.Task[Result]:
        return asyncio.create_task(thinker.run(cases[i], f"r{i}", "", priority, written[i], max_tokens=lengths[i]))

    async def until_written(i: int) -> None:
        while not written[i]:
            await asyncio.sleep(0.001)

    async with asyncio.timeout(GUARD_S):
        running = [begin(0)]
        await until_written(0)
        thinker.engine.expected.announce(for_s=GUARD_S)
        announced_s, before = time.monotonic(), len(written[0])
        await asyncio.sleep(0.3)
        assert len(written[0]) - before < 4 + time.monotonic() - announced_s
        running.append(begin(1, priority=0))
        await until_written(1)
        before, left = len(written[0]), lengths[1] - len(written[1])
        running.append(begin(2))
        await running[1]
        thinker.engine.expected.announce(for_s=0)
        assert len(written[0]) - before < left / 4 + 2
        assert len(written[2]) < left / 4
        results = await asyncio.gather(*running)
    for conversation, length, result in zip(cases, lengths, results, strict=True):
        thinker.assert_equal(result, thinker.expected(conversation, length))


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


async def test_a_video_may_have_more_tokens_than_vllm_keeps_room_for(thinker: Thinker) -> None:
    """By default as many as a step has, or as the largest of one frame."""
    turn = Message("user", [file("video", mp4(9.0, sound=False, size=(320, 240))), "and now?"])
    prompt = await thinker.preprocessor.prepare(conversation := Conversation([turn]))
    assert prompt.image_tokens > 1000
    thinker.assert_equal(await thinker.run(conversation), thinker.expected(conversation))


@pytest.mark.parametrize(
    ("choice", "frames", "fps"),
    [(FrameChoice(4), 4, 1.0), (FrameChoice(2, 4.0), 2, 0.5)],
)
async def test_a_video_of_chosen_frames_lasts_as_long_as_before(
    thinker: Thinker, choice: FrameChoice, frames: int, fps: float
) -> None:
    """With its sound, whose turns between those of the frames show the time."""
    turn = Message("user", [file("video", mp4(4.0)), "and now?"])
    conversation = Conversation([turn], use_audio_in_video=True, frames=choice)
    thinker.assert_equal(await thinker.run(conversation), thinker.expected(conversation, fps=fps))
    by_default, chosen = [
        (await thinker.preprocessor.prepare(Conversation([turn], frames=each))).image_tokens for each in (None, choice)
    ]
    assert chosen * 8 == by_default * frames  # two a second


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


async def test_a_grammar_is_not_compiled_in_this_process(thinker: Thinker, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
    from vllm.v1.structured_output import backend_xgrammar

    original, compiled_in = backend_xgrammar.validate_xgrammar_grammar, list[int]()

    def compiled(params: SamplingParams) -> None:
        compiled_in.append(1)
        original(params)

    monkeypatch.setattr(backend_xgrammar, "validate_xgrammar_grammar", compiled)
    member = {"type": "object", "properties": {f"m{i}": {"type": "boolean"} for i in range(40)}}
    schema = {"type": "object", "properties": {f"p{i}": member for i in range(10)}}
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
    assert not compiled_in


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


async def called(thinker: Thinker, sampling: dict[str, Any], **fields: Any) -> list[thinker_pb2.GenerateResponse]:
    """What a call of the thinker answers to a turn of text."""
    turn = thinker_pb2.ChatMessage(role="user", content=[thinker_pb2.ContentPart(text="tell me")])
    of_text = {} if "prompt" in fields else {"messages": [turn]}
    start = thinker_pb2.GenerateStart(request_id="r", sampling={"temperature": 0} | sampling, **of_text, **fields)
    call = Call("thinker", "r")
    generation = Generation(thinker.engine, thinker.preprocessor, thinker.settings, start, None, call, None)
    await generation.refuse()
    answer = [await generation.prepare()]
    async with aclosing(generation.beams() if start.HasField("beams") else generation.answer()) as responses:
        return answer + [response async for response in responses]


def of_prompt(answer: list[thinker_pb2.GenerateResponse]) -> list[thinker_pb2.TokenLogprob]:
    return [token for response in answer for token in response.prompt_logprobs.tokens]


@pytest.mark.parametrize("name", ["text", "image and audio", "two sounds", "video"])
async def test_media_whose_places_are_told_can_be_put_in_again(thinker: Thinker, name: str) -> None:
    conversation = conversations()[name]
    prompt = await thinker.preprocessor.prepare(conversation)
    ids, files, begin = list[int](), list[MediaFile](), 0
    of_kind = {kind: [each for each in conversation.media if each.kind == kind] for kind in ("image", "audio", "video")}
    for kind, at, length in sorted(prompt.placeholders, key=lambda place: place[1]):
        ids += prompt.token_ids[begin : at + 1]
        begin = at + length
        files.append(of_kind[kind].pop(0))
    raw = RawPrompt(token_ids=ids + prompt.token_ids[begin:], files=files)
    assert (await thinker.preprocessor.prepare(Conversation([], raw=raw))).token_ids == prompt.token_ids
    assert len(files) == len(conversation.media)


async def test_log_probabilities_of_the_whole_vocabulary(thinker: Thinker) -> None:
    """They sum to 1, and the likeliest are those that are told alone; also beside a request that chooses tokens."""
    size = thinker.engine.checkpoint.vocab_size
    some = {"max_tokens": 2, "top_logprobs": 5, "prompt_logprobs": 5}
    whole = {"max_tokens": 2, "top_logprobs": -1, "prompt_logprobs": -1}
    chosen = {"max_tokens": 2, "top_logprobs": 0, "logprob_token_ids": [7, 8]}
    few, many, by_choice = await asyncio.gather(*(called(thinker, sampling) for sampling in (some, whole, chosen)))
    for tokens in (of_prompt, lambda answer: [token for each in answer for token in each.delta.logprobs]):
        for one, other in zip(tokens(few), tokens(many), strict=True):
            assert one.token_id == other.token_id
            if one.top:
                of_all = [each.logprob for each in other.top]
                assert len({each.token_id for each in other.top}) == size
                assert sum(map(math.exp, of_all)) == pytest.approx(1, abs=1e-3)
                assert of_all == sorted(of_all, reverse=True)
                assert of_all[:5] == pytest.approx([each.logprob for each in one.top], abs=1e-4)
                assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
                assert other.logprob == of_all[other.rank - 1]  # several may be as likely
    assert {each.token_id for delta in by_choice for token in delta.delta.logprobs for each in token.top} >= {7, 8}
    most = MAX_LOGPROBS // size
    for sampling, kind in (
        ({"top_logprobs": -1}, InvalidInput),
        ({"top_logprobs": -1, "max_tokens": most + 1}, TooManyLogprobs),
        ({"top_logprobs": -1, "max_tokens": most, "prompt_logprobs": -1}, TooManyLogprobs),
        ({"top_logprobs": -2, "max_tokens": 1}, InvalidInput),
    ):
        with pytest.raises(kind) as refused:
            await called(thinker, sampling)
        assert type(refused.value) is kind


async def test_chosen_tokens_are_scored_at_the_positions_of_a_prompt(thinker: Thinker) -> None:
    """As among the log-probabilities of the whole vocabulary; also of prompts that take several steps."""
    turn = Conversation([Message("user", ["tell me " * 60])])
    ids = (await thinker.preprocessor.prepare(turn)).token_ids
    prompt = {"token_ids": {"ids": ids}}
    whole = of_prompt(await called(thinker, {"max_tokens": 1, "prompt_logprobs": -1}, prompt=prompt))
    assert len(ids) > 128  # two steps and more
    cases = (0, [[ids[i + 1], 7] for i in range(len(ids) - 1)]), (70, [[8], *[[9, -1, 10]] * (len(ids) - 72)])
    asked = [{"prompt_logprob_start": at, "prompt_logprob_token_ids": _rows(rows)} for at, rows in cases]
    answers = await asyncio.gather(*(called(thinker, {"max_tokens": 2} | each, prompt=prompt) for each in asked))
    for (start, rows), answer in zip(cases, answers, strict=True):
        (scores,) = (each.prompt_scores for each in answer if each.HasField("prompt_scores"))
        width = max(map(len, rows))
        told = [scores.logprobs[i : i + width] for i in range(0, len(scores.logprobs), width)]
        assert (scores.columns, len(told)) == (width, len(rows))
        for i, (row, line) in enumerate(zip(rows, told, strict=True), start + 1):
            by_id = {each.token_id: each.logprob for each in whole[i].top} | {-1: -math.inf}
            assert line == pytest.approx([by_id[each] for each in row + [-1] * (width - len(row))], abs=1e-3)
        assert sum(len(each.delta.token_ids) for each in answer) == 2
    again = await called(thinker, {"max_tokens": 2} | asked[0], prompt=prompt)  # the prefix cache has it
    assert any(each.HasField("prompt_scores") for each in again)
    size = len(ids) - 1
    for bad in ([[1]] * (size - 1), [[1, 2**30]] * size, [[1] * 21] * size, [[]] * size):
        with pytest.raises(InvalidInput) as refused:
            await called(thinker, {"prompt_logprob_token_ids": _rows(bad)}, prompt=prompt)
        assert refused.value.field == "sampling.prompt_logprob_token_ids"


def _rows(rows: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"ids": row} for row in rows]


def reference_beams(thinker: Thinker, prompt_ids: list[int], width: int, tokens: int) -> list[tuple[list[int], float]]:
    """(ids, log-probability) of each beam that transformers' search finds, best first. All are as long."""
    found = thinker.reference.thinker.generate(
        input_ids=torch.tensor([prompt_ids]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=tokens,
        do_sample=False,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    sequences = found.sequences[:, len(prompt_ids) :].tolist()
    return list(zip(sequences, found.sequences_scores.tolist(), strict=True))


async def test_beams_are_those_that_transformers_finds(thinker: Thinker) -> None:
    """Of answers of one length: of others, tests/pure/test_thinker_beams.py knows all that there are."""
    sampling = {"max_tokens": 6, "ignore_eos": True, "top_logprobs": 0}
    for width in (2, 5):
        first, *found = await called(
            thinker, sampling, beams={"width": width, "length_penalty": 0}, wants_prompt_token_ids=True
        )
        deltas = [each.beam.delta for each in found]
        told = [(list(delta.token_ids), sum(one.logprob for one in delta.logprobs)) for delta in deltas]
        asked = [*first.prompt.token_ids], width, 6
        make = partial(reference_beams, thinker, *asked)
        expected = kept_value(make, Path(thinker.settings.model), Path(__file__), *asked)
        assert [ids for ids, _ in told] == [ids for ids, _ in expected]
        assert [score for _, score in told] == pytest.approx([score for _, score in expected], abs=1e-3)
        assert len({tuple(ids) for ids, _ in told}) == width


async def test_a_search_that_is_given_up_leaves_nothing_running(thinker: Thinker) -> None:
    sampling = {"max_tokens": 3500, "ignore_eos": True}
    running, ended = thinker.engine._llm.output_processor, vllm_metric("vllm:request_success_total")
    search = asyncio.create_task(called(thinker, sampling, beams={"width": 4}))
    async with asyncio.timeout(GUARD_S):  # each token of a beam is a request of the engine's
        while vllm_metric("vllm:request_success_total") < ended + 8 or not running.has_unfinished_requests():
            await asyncio.sleep(0.001)
    search.cancel()
    assert isinstance((await asyncio.gather(search, return_exceptions=True))[0], asyncio.CancelledError)
    assert not running.has_unfinished_requests()
    conversation = conversations()["text"]  # the metrics are those of a step
    thinker.assert_equal(await thinker.run(conversation), thinker.expected(conversation))
    assert vllm_metric("vllm:num_requests_running") == vllm_metric("vllm:kv_cache_usage_perc") == 0


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
