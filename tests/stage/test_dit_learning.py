"""What is learned of calls, and what is found out to be wrong."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from services.diffusion.families import NO_BATCHING
from services.dit.batching import Unbatchable, content, join, key_of, split
from services.dit.coroutine import BatchPoint
from services.dit.learning import MadeCall, learn

WIDTH = 4
ROPE = torch.linspace(0, 1, WIDTH)
IDS = torch.tensor([[0.5], [2.0]])  # as many rows as a call has samples, by chance


def calls_of(point: BatchPoint, seed: int, steps: int, **more: Any) -> list[MadeCall]:
    """Those of an output, each of a sample with and one without its prompt."""
    made, generator = [], torch.Generator().manual_seed(seed)
    prompt = torch.randn(2, WIDTH, generator=generator)
    for step in range(steps):
        latents = torch.randn(1, WIDTH, generator=generator).repeat(2, 1)
        own = {name: list(value) if isinstance(value, list) else value for name, value in more.items()}
        arguments = point.bind((latents,), {"time": torch.tensor(1 - step / steps), "prompt": prompt, **own})
        call = MadeCall.before(point, arguments)
        made.append(call.after(point.run(arguments)))
    return made


def run(point: BatchPoint, arguments: dict[str, Any]) -> Any:
    try:
        return point.run(arguments)
    except IndexError as error:
        raise Unbatchable(f"it fails: {error}") from error


def learned(function: Callable[..., Any], one: dict[str, Any], other: dict[str, Any]) -> tuple[BatchPoint, Any]:
    point = BatchPoint("model", function, NO_BATCHING)
    return point, learn(calls_of(point, 1, 2, **one), calls_of(point, 2, 4, **other), run)[point]


def mixed(latents: torch.Tensor, time: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    return latents * prompt.tanh() + time.reshape(-1, 1)


def plain(latents: Any, time: Any, prompt: Any, rope: Any = None, sizes: Any = None, scale: float = 1.0) -> Any:
    """One of whose arguments all samples share, and one has a dictionary."""
    turned = latents if rope is None else latents * rope[0] + rope[1]
    if sizes is not None:
        turned = turned + sizes["area"].log() * scale
    return (mixed(turned, time, prompt),)


def test_arguments_are_joined_by_what_their_shapes_say() -> None:
    more = {"rope": (ROPE, ROPE), "scale": 2.0}
    areas = [{"sizes": {"area": torch.full((2, 1), float(side)), "hints": None}} for side in (2, 3)]
    point, rules = learned(plain, more | areas[0], more | areas[1])
    assert (rules.rows, rules.shared, rules.expanded) == ("latents", {"rope"}, {"time"})
    one, other = (calls_of(point, seed, 1, **more, **each)[0] for seed, each in zip((3, 4), areas, strict=True))
    assert key_of(rules, one.arguments, content) == key_of(rules, other.arguments, content)
    results = split(point.run(join(rules, [one.arguments, other.arguments])), [2, 2])
    assert all(torch.equal(mine[0], call.result[0]) for mine, call in zip(results, (one, other), strict=True))


def test_a_tensor_with_as_many_rows_by_chance_is_shared() -> None:
    def model(latents: Any, time: Any, prompt: Any, ids: Any) -> Any:
        if len(ids) > 2:
            raise IndexError("they are two")
        return mixed(latents * ids.sum(), time, prompt)

    _, rules = learned(model, {"ids": IDS}, {"ids": IDS})
    assert rules.shared == {"ids"}


def first_mask(latents: Any, time: Any, prompt: Any, mask: Any) -> Any:
    """It reads one sample's mask for all."""
    return mixed(latents * mask[0], time, prompt)


def test_what_is_read_for_one_sample_must_be_alike() -> None:
    some, others = torch.tensor([[1.0, 1, 1, 0]] * 2), torch.tensor([[1.0, 1, 0, 0]] * 2)
    with pytest.raises(Unbatchable, match="others than each alone"):
        learned(first_mask, {"mask": some}, {"mask": others})
    point, rules = learned(first_mask, {"mask": some}, {"mask": some})
    assert rules.alike == {"mask"}
    keys = [key_of(rules, calls_of(point, 1, 1, mask=mask)[0].arguments, content) for mask in (some, some, others)]
    assert keys[0] == keys[1] != keys[2]


def in_halves(latents: Any, time: Any, prompt: Any) -> Any:
    """As guidance in a model does: the first half of the samples has no prompt."""
    without, having = latents.chunk(2)
    return mixed(torch.cat([without, having + without]), time, prompt)


def one_output(latents: Any, time: Any, prompt: Any) -> Any:
    if len(latents) != 2:
        raise IndexError("the batch is none of mine")
    return mixed(latents, time, prompt)


def no_rows(latents: Any, time: Any, prompt: Any) -> Any:
    return mixed(latents, time, prompt).sum()


def same(latents: Any, time: Any, prompt: Any) -> Any:
    return torch.ones_like(latents)


@pytest.mark.parametrize(
    ("function", "more", "reason"),
    [
        (in_halves, {}, "two joined calls of model give others than each alone"),
        (one_output, {}, "it fails: the batch is none of mine"),
        (no_rows, {}, "the result of model has no samples"),
        (same, {}, "so that a mistake would not be seen"),
        (lambda latents, time, prompt, cache: mixed(latents, time, prompt), {"cache": object()}, "cache, a object"),
    ],
)
def test_calls_that_cannot_be_joined(function: Callable[..., Any], more: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unbatchable, match=reason):
        learned(function, more, more)


def test_calls_of_other_shapes_are_not_joined() -> None:
    def model(latents: Any, time: Any, prompt: Any, words: Any) -> Any:
        return mixed(latents * words.mean(1), time, prompt)

    def words(length: int) -> dict[str, torch.Tensor]:
        return {"words": torch.randn(2, length, 1)}

    with pytest.raises(Unbatchable, match="no calls of model for two outputs have like arguments"):
        learned(model, words(3), words(5))
    point, rules = learned(model, words(3), words(3))
    calls: Sequence[MadeCall] = [calls_of(point, 1, 1, **words(length))[0] for length in (3, 3, 5)]
    one, other, longer = (key_of(rules, call.arguments, content) for call in calls)
    assert one == other != longer


def test_what_a_model_makes_of_its_layers_is_joined_layer_by_layer() -> None:
    """As a ControlNet's results are, which are arguments of the denoiser."""

    def steers(latents: Any, time: Any, prompt: Any) -> Any:
        layers = [latents.repeat(1, times) * prompt.mean(1, keepdim=True) for times in (1, 2, 3)]
        return layers, mixed(latents, time, prompt)

    def denoises(latents: Any, time: Any, prompt: Any, states: Any) -> Any:
        while states:
            latents = latents + states.pop(0)  # as a UNet takes an adapter's
        return (mixed(latents, time, prompt),)

    _, rules = learned(steers, {}, {})
    assert rules.layered
    joined = [torch.arange(12.0).reshape(12, 1) * times for times in (1, 2, 3)], torch.zeros(12, 1)
    parts = split(joined, [3, 9], rules.layered)  # as many layers as the first call has samples
    assert [[layer.shape for layer in layers] for layers, _ in parts] == [[(3, 1)] * 3, [(9, 1)] * 3]
    states = [{"states": [torch.randn(2, WIDTH) for _ in range(3)]} for _ in range(2)]
    point, rules = learned(denoises, *states)
    assert (rules.layers, rules.layered) == ({"states"}, False)
    one, other = (calls_of(point, seed, 1, **each)[0] for seed, each in zip((3, 4), states, strict=True))
    results = split(point.run(join(rules, [one.arguments, other.arguments])), [2, 2])
    assert all(torch.equal(mine[0], call.result[0]) for mine, call in zip(results, (one, other), strict=True))


def test_an_argument_that_was_not_seen_is_not_joined() -> None:
    point, rules = learned(plain, {}, {})
    for more in ({"scale": 2.0}, {"rope": (ROPE, ROPE)}, {"sizes": {"area": torch.ones(2, 1)}}):
        with pytest.raises(Unbatchable):
            key_of(rules, calls_of(point, 1, 1, **more)[0].arguments, content)
