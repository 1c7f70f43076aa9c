"""Beam search: what it finds, against all answers that there are."""

import asyncio
import itertools
import math
import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput
from services.thinker.beams import Beam, BeamRun, Search, refuse

END, WORDS, MOST = 0, 4, 4


def logprobs(before: tuple[int, ...], seed: int) -> dict[int, SimpleNamespace]:
    """Of each word after `before`: some numbers, always the same."""
    draw = random.Random(f"{seed} {before}")
    weights = [draw.random() + 0.05 for _ in range(WORDS)]
    order = sorted(range(WORDS), key=lambda word: -weights[word])
    return {
        word: SimpleNamespace(logprob=math.log(weights[word] / sum(weights)), rank=order.index(word) + 1)
        for word in range(WORDS)
    }


def all_answers(seed: int, penalty: float, prompt: int) -> list[tuple[float, tuple[int, ...]]]:
    """(score, words) of each answer, best first."""
    found = []
    for size in range(1, MOST + 1):
        for words in itertools.product(range(WORDS), repeat=size):
            has_ended = words[-1] == END
            if END in words[:-1] or not (has_ended or size == MOST):
                continue
            total = sum(logprobs(words[:i], seed)[word].logprob for i, word in enumerate(words))
            found.append((total / (prompt + size - has_ended) ** penalty, words))
    return sorted(found, reverse=True)


async def search(seed: int, width: int, penalty: float, prompt: int = 3, most: int = MOST) -> list[Beam]:
    looked = []

    async def look(beams: Sequence[Beam]) -> list[dict[int, SimpleNamespace]]:
        looked.append(len(beams))
        assert len(beams) <= width
        return [logprobs(tuple(beam.token_ids), seed) for beam in beams]

    found = await Search(width, penalty, prompt, most, frozenset({END})).run(look)  # pyright: ignore[reportArgumentType]
    assert len(looked) <= most
    return found


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 3.0])
async def test_a_wide_search_finds_the_best_of_all(penalty: float) -> None:
    for seed in range(6):
        everything = all_answers(seed, penalty, prompt=3)
        found = await search(seed, len(everything), penalty)
        told = [tuple(beam.token_ids) for beam in found]
        assert told == [words for _, words in everything]
        assert [beam.logprob / (3 + beam.length) ** penalty for beam in found] == pytest.approx(
            [score for score, _ in everything]
        )


async def test_a_search_of_one_takes_the_likeliest_word_each_time() -> None:
    for seed in range(6):
        words: tuple[int, ...] = ()
        while len(words) < MOST:
            by_id = logprobs(words, seed)
            words = (*words, min((word for word in by_id if word != END), key=lambda word: by_id[word].rank))
        (found,) = await search(seed, 1, penalty=50)  # so long ones are better than any that ends
        assert found.token_ids == list(words)
        assert not found.has_ended


async def test_a_search_ends_when_nothing_open_is_better() -> None:
    found = await search(1, 2, penalty=0, most=10_000)
    assert all(beam.has_ended for beam in found)
    assert found[0].logprob >= found[1].logprob


BAD = [
    ({"beams": {"width": 0}}, "beams.width"),
    ({"beams": {"width": 11}}, "beams.width"),
    ({"beams": {"width": 2, "length_penalty": math.nan}}, "beams.length_penalty"),
    ({"output_stream_id": "s"}, "output_stream_id"),
    ({"tools": [{"name": "lamp"}]}, "tools"),
    ({"count_only": True}, "count_only"),
    ({"sampling": {"json_object": True}}, "sampling.json_object"),
    ({"sampling": {"stop": ["a"]}}, "sampling.stop"),
    ({"sampling": {"logit_bias": {1: 1.0}}}, "sampling.logit_bias"),
    ({"sampling": {"min_tokens": 1}}, "sampling.min_tokens"),
    ({"sampling": {"prompt_logprobs": 0}}, "sampling.prompt_logprobs"),
    ({"sampling": {"top_logprobs": -1}}, "sampling.top_logprobs"),
    ({"sampling": {"prompt_logprob_token_ids": [{"ids": [1]}]}}, "sampling.prompt_logprob_token_ids"),
]


@pytest.mark.parametrize(("members", "field"), BAD)
def test_what_beams_do_not_have_is_refused(members: dict, field: str) -> None:
    refuse(thinker_pb2.GenerateStart(beams=thinker_pb2.BeamSearch(width=10)))
    with pytest.raises(InvalidInput) as refused:
        refuse(thinker_pb2.GenerateStart(**{"beams": {"width": 2}, **members}))
    assert refused.value.field == field


class Engine:
    """Writes words until it is told to fail or to wait."""

    max_context_tokens, end_ids = 100, frozenset[int]()

    def __init__(self) -> None:
        self.running, self.fails, self.waits = 0, False, False

    async def generate(self, request_id, prompt, params, **options):
        self.running += 1
        try:
            await asyncio.sleep(0)
            if self.fails and prompt.engine_input["prompt_token_ids"][-1] == 1:
                raise InvalidInput("sampling", "no")
            if self.waits or self.fails:
                await asyncio.sleep(60)
            yield SimpleNamespace(logprobs=[logprobs(tuple(prompt.token_ids[1:]), 1)])
        finally:
            self.running -= 1


@pytest.mark.parametrize("by", ["a failure", "a cancellation"])
async def test_a_search_that_ends_early_ends_its_requests(by: str) -> None:
    from services.thinker.conversation import Prompt

    engine = Engine()
    prompt = Prompt([7], [], 0, 0, {"prompt_token_ids": [7]})
    start = thinker_pb2.GenerateStart(request_id="r", beams={"width": 3}, sampling={"max_tokens": 5})
    run = BeamRun(engine, start, prompt, None, None)  # pyright: ignore[reportArgumentType]
    assert len(await run.beams()) == 3
    assert engine.running == 0
    engine.fails, engine.waits = by == "a failure", by == "a cancellation"
    if engine.fails:
        engine.fails = False
        first = await run._look([Beam()])
        engine.fails = True
        with pytest.raises(InvalidInput):
            await run._look([Beam().after(word, first[0], False) for word in (1, 2, 3)])
    else:
        search = asyncio.create_task(run.beams())
        await asyncio.sleep(0.05)
        assert engine.running == 1
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search
    assert engine.running == 0
