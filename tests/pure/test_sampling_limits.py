"""Limits of sampling parameters: gateway, thinker and talker agree."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from gateway.answers.request import ChatCompletionRequest
from gateway.dialects.openai.completions import CompletionRequest
from gateway.dialects.responses.schema import ResponseRequest
from gateway.dialects.vllm.request import SamplingParams
from gateway.pipeline.sampling import TalkerSampling, ThinkerSampling
from quartet.v1 import thinker_pb2
from services.common import sampling_limits as limits
from services.common.errors import InvalidInput
from services.talker.family import SamplingDefaults
from services.talker.sampling import resolve
from services.thinker import logprobs
from services.thinker.config import ThinkerSettings
from services.thinker.request import _check_sampling

SHARED = {
    "temperature": limits.TEMPERATURE,
    "top_p": limits.TOP_P,
    "repetition_penalty": limits.REPETITION_PENALTY,
}
THINKER = SHARED | {
    "min_p": limits.MIN_P,
    "presence_penalty": limits.PENALTY,
    "frequency_penalty": limits.PENALTY,
}
TALKER = SHARED | {"predictor_temperature": limits.TEMPERATURE, "predictor_top_p": limits.TOP_P}
DEFAULTS = SamplingDefaults(temperature=1, top_k=0, top_p=1, repetition_penalty=1, max_frames=1)


def accepts(check: Callable[..., Any], **value: float) -> bool:
    try:
        check(**value)
    except (InvalidInput, ValidationError):
        return False
    return True


def thinker(**value: Any) -> None:
    _check_sampling(thinker_pb2.SamplingParameters(**value), vocab_size=10)


def talker(**value: float) -> None:
    resolve(DEFAULTS, **value)


@pytest.mark.parametrize("name", THINKER)
def test_gateway_and_thinker_accept_the_same(name: str):
    _agree(name, THINKER[name], ThinkerSampling, thinker)


@pytest.mark.parametrize("name", TALKER)
def test_gateway_and_talker_accept_the_same(name: str):
    _agree(name, TALKER[name], TalkerSampling, talker)


def _agree(name: str, limit: limits.Range, *checks: Callable[..., Any]) -> None:
    edges = (limit.least - 0.125, limit.least, limit.least + 0.125, limit.most, limit.most + 0.125, math.inf, math.nan)
    for value in edges:
        assert [accepts(check, **{name: value}) for check in checks] == [value in limit] * len(checks), value


@pytest.mark.parametrize("name", ["top_logprobs", "prompt_logprobs"])
def test_a_thinker_accepts_as_many_logprobs_as_the_table_says(name: str):
    assert accepts(thinker, **{name: limits.TOP_LOGPROBS.most})
    assert not accepts(thinker, **{name: limits.TOP_LOGPROBS.most + 1})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"top_logprobs": -1, "max_tokens": 1}, "top_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprob_token_ids": [{"ids": [1]}]}, "prompt_logprob_token_ids"),
    ],
)
def test_log_probabilities_that_cost_much_are_for_thinkers_that_were_started_so(given: dict[str, Any], name: str):
    sampling = thinker_pb2.SamplingParameters(**given)
    with pytest.raises(InvalidInput, match=r"--(prompt|vocabulary)-logprobs=true") as caught:
        logprobs.refuse(sampling, ThinkerSettings(model="x"))
    assert caught.value.field == f"sampling.{name}"
    logprobs.refuse(sampling, ThinkerSettings(model="x", prompt_logprobs=True, vocabulary_logprobs=True))


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        (ChatCompletionRequest, "top_logprobs"),
        (CompletionRequest, "logprobs"),
        (SamplingParams, "logprobs"),
        (SamplingParams, "prompt_logprobs"),
        (ResponseRequest, "top_logprobs"),
    ],
)
def test_an_endpoint_accepts_as_many_logprobs_as_a_thinker(schema: type[BaseModel], name: str):
    number, _ = schema.model_json_schema()["properties"][name]["anyOf"]
    least = limits.TOP_LOGPROBS.least if schema is ResponseRequest else limits.WHOLE_VOCABULARY
    assert (number["minimum"], number["maximum"]) == (least, limits.TOP_LOGPROBS.most)


@pytest.mark.parametrize(("limit", "words"), [(limits.TEMPERATURE, "0 to 2"), (limits.TOP_P, "above 0 and at most 1")])
def test_a_range_in_words(limit: limits.Range, words: str):
    assert str(limit) == words


LISTS: list[tuple[str, Callable[[int], Any], int]] = [
    ("allowed_token_ids", range, 1024),
    ("stop_token_ids", range, 120),
    ("logit_bias", lambda n: dict.fromkeys(range(n), 1.0), 1024),
    ("bad_words", lambda n: ["x"] * n, 64),
    ("bad_words", lambda n: ["é" * (n // 2)], 448),
]


@pytest.mark.parametrize(("name", "of", "most"), LISTS)
def test_lists_are_no_longer_than_vllms_workers_take(name: str, of: Callable[[int], Any], most: int) -> None:
    _check_sampling(thinker_pb2.SamplingParameters(**{name: of(most)}), vocab_size=5000)
    with pytest.raises(InvalidInput) as caught:
        _check_sampling(thinker_pb2.SamplingParameters(**{name: of(most + 2)}), vocab_size=5000)
    assert caught.value.field == f"sampling.{name}"


def test_no_word_is_blank() -> None:
    with pytest.raises(InvalidInput, match=r"sampling\.bad_words"):
        _check_sampling(thinker_pb2.SamplingParameters(bad_words=["a", " "]), vocab_size=5000)
