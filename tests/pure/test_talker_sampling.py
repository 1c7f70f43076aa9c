"""Draws follow the distribution that transformers' warpers leave, and nothing but seed, frame and group."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.common.errors import InvalidInput
from services.talker.family import SamplingDefaults
from services.talker.sampling import SamplingRows, draw, penalize, resolve, uniform

DEFAULTS = SamplingDefaults(0.9, 50, 1.0, 1.05, 4096, 1.0, 50, 0.8)
CODES = 40


def _rules(temperature: float, top_k: int, top_p: float, rows: int) -> SamplingRows:
    rules = SamplingRows(rows, torch.device("cpu"))
    for row in range(rows):
        rules.set(row, temperature, top_k, top_p)
    return rules


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.9, 5, 1.0), (1.3, 0, 0.6), (0.7, 12, 0.8), (1.0, 0, 1.0)]
)
def test_draws_follow_transformers_warpers(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(1, CODES, generator=torch.Generator().manual_seed(3)) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)]
    expected = warpers(torch.zeros(1, 0, dtype=torch.long), logits.clone()).softmax(dim=-1)[0]  # pyright: ignore[reportArgumentType]

    grid = 20_000  # evenly spread noise: the share of each code is its probability, to within one grid cell
    noise = (torch.arange(grid) + 0.5) / grid
    codes = draw(logits.expand(grid, -1), _rules(temperature, top_k, top_p, grid).first(grid, top_k or CODES), noise)
    shares = torch.bincount(codes, minlength=CODES) / grid
    torch.testing.assert_close(shares, expected, atol=2e-4, rtol=0)


def test_greedy_rows_and_sampled_rows_share_a_batch() -> None:
    logits = torch.randn(2, CODES, generator=torch.Generator().manual_seed(1))
    rules = SamplingRows(2, torch.device("cpu"))
    rules.set(0, 0.0, 0, 1.0)
    rules.set(1, 1.0, 1, 1.0)
    assert torch.equal(draw(logits, rules.first(2, CODES), torch.tensor([0.99, 0.99])), logits.argmax(dim=-1))


def test_a_greedy_row_gets_the_same_of_equal_logits_whoever_shares_the_step() -> None:
    logits = torch.randint(0, 4, (64, 512), generator=torch.Generator().manual_seed(5)).float()
    rules = SamplingRows(64, torch.device("cpu"))
    for slot in range(64):
        rules.set(slot, 0.0 if slot % 2 else 1.0, 1, 1.0)  # one code is kept in either way
    alone = draw(logits, rules.first(64, 0), None)
    for width in (1, 50, 512):
        torch.testing.assert_close(draw(logits, rules.first(64, width), torch.rand(64)), alone)


@pytest.mark.parametrize(("temperature", "penalty"), [(1e-40, 1.0), (1.0, 1e-40), (2.0, 3e38)])
def test_extreme_rules_still_give_codes(temperature: float, penalty: float) -> None:
    logits = torch.randn(2, CODES, generator=torch.Generator().manual_seed(1))
    logits[:, 5:9] = -torch.inf
    seen = torch.zeros(2, CODES, dtype=torch.bool)
    seen[:, ::2] = True
    penalized = penalize(logits, seen, torch.full((2,), penalty))
    codes = draw(penalized, _rules(temperature, 0, 0.8, 2).first(2, CODES), torch.tensor([0.0, 0.99]))
    if temperature < 1:
        assert torch.equal(codes, logits.argmax(dim=-1))
    assert penalized.gather(-1, codes[:, None]).isfinite().all()


def test_a_row_that_is_not_numbers_leaves_the_others_alone() -> None:
    logits = torch.randn(2, CODES, generator=torch.Generator().manual_seed(1))
    logits[0] = torch.nan
    codes = draw(logits, _rules(1.0, 1, 1.0, 2).first(2, CODES), torch.tensor([0.5, 0.5]))
    assert codes[1] == logits[1].argmax()


def test_repetition_penalty_equals_transformers() -> None:
    logits = torch.randn(1, CODES, generator=torch.Generator().manual_seed(2))
    earlier = torch.tensor([[3, 7, 7, 20]])
    seen = torch.zeros(1, CODES, dtype=torch.bool).scatter_(1, earlier, True)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(earlier, logits.clone())  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(penalize(logits, seen, torch.tensor([1.3])), expected)


def test_noise_is_uniform_and_a_function_of_seed_frame_and_group() -> None:
    seeds, frames = torch.arange(100).repeat_interleave(50), torch.arange(50).repeat(100)
    noise = uniform(seeds, frames, 16)
    assert torch.equal(noise[:, 777:778], uniform(seeds[777:778], frames[777:778], 16))
    assert 0 <= noise.min() < noise.max() < 1
    assert noise.unique().numel() > 0.99 * noise.numel()
    counts = torch.histc(noise, bins=10, min=0, max=1) / noise.numel()
    torch.testing.assert_close(counts, torch.full((10,), 0.1), atol=0.005, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.5),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("repetition_penalty", 0.0),
        ("max_frames", 0),
        ("predictor_temperature", -0.1),
        ("predictor_top_k", -1),
        ("predictor_top_p", 1.1),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidInput) as error:
        resolve(DEFAULTS, **{field: value})
    assert error.value.field == f"sampling.{field}"


def test_temperature_zero_is_greedy_for_the_predictor_too_unless_set_apart() -> None:
    assert resolve(DEFAULTS, temperature=0).predictor_temperature == 0
    assert resolve(DEFAULTS, temperature=0, predictor_temperature=0.5).predictor_temperature == 0.5
    assert resolve(DEFAULTS, temperature=0.5).predictor_temperature == DEFAULTS.predictor_temperature
