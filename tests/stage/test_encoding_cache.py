"""Encoded prompts and images that are kept: what is made with them is bit for bit what is made without."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from prometheus_client import REGISTRY

from quartet.v1 import dit_pb2
from services.diffusion.encoding_cache import EncodingCache
from tests.support.stage.dit_engine import Bench, bench
from tests.support.weights import unlisted
from tests.support.weights.checkpoints import diffusion_checkpoint

PICTURE = Image.linear_gradient("L").resize((64, 64)).convert("RGB")
SMALL = {"width": 64, "height": 64}
# Checkpoint, fields of a request, its images, and the methods whose results are kept.
CASES: dict[str, tuple[Callable[[], Path], dict[str, Any], list[Image.Image], tuple[str, ...]]] = {
    "of a row": (lambda: diffusion_checkpoint("z-image"), SMALL, [], ("encode_prompt",)),
    "a context, of a pipeline of our own": (lambda: diffusion_checkpoint("bagel"), SMALL, [], ("encode_part",)),
    "a video of an image": (
        lambda: diffusion_checkpoint("wan-i2v"),
        SMALL | {"num_frames": 5},
        [PICTURE],
        ("encode_prompt", "vae.encode"),
    ),
    "without a row, an edit": (
        lambda: unlisted.unlisted_checkpoint(unlisted.stable_diffusion),
        {},
        [PICTURE],
        ("encode_prompt", "vae.encode"),
    ),
    "without a row, two texts": (
        lambda: unlisted.unlisted_checkpoint(unlisted.stable_diffusion_xl),
        SMALL,
        [],
        ("encode_prompt",),
    ),
    "no text": (
        lambda: unlisted.unlisted_checkpoint(unlisted.stable_video_diffusion),
        SMALL | {"num_frames": 3},
        [PICTURE],
        ("encode_image",),
    ),
}


def calls(stage: str = "dit") -> dict[tuple[str, str], float]:
    """Calls so far, by method and outcome."""
    name = "quartet_encoding_cache_calls_total"
    found = [each for metric in REGISTRY.collect() for each in metric.samples if each.name == name]
    return {(e.labels["method"], e.labels["outcome"]): e.value for e in found if e.labels["stage"] == stage}


def made(dit: Bench, prompt: str, seed: int, fields: dict[str, Any], images: list[Image.Image]) -> torch.Tensor:
    start = dit_pb2.DitStart(prompt=prompt, seed=seed, num_inference_steps=3, **fields)
    return dit.make(dit.orders(start, images))[0]


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_that_comes_again_makes_the_same_bits(case: str) -> None:
    checkpoint, fields, images, methods = CASES[case]
    asked = [("a red fox", 1), ("a house by the sea", 2), ("a red fox", 3)]
    with bench(checkpoint()) as dit:
        wanted = [made(dit, *each, fields, images) for each in asked]
        dit.engine.models.keep_encodings("dit", 64)
        before = calls()
        for each, theirs in zip(asked, wanted, strict=True):
            assert torch.equal(made(dit, *each, fields, images), theirs)
        assert not any(torch.equal(one, other) for one, other in itertools.pairwise(wanted))
        hits = {method: calls()[method, "hit"] - before.get((method, "hit"), 0) for method in methods}
        assert all(hits.values()), hits


class Encoders:
    """A pipeline whose method gives what `of` makes of its arguments."""

    def __init__(self, of: Callable[..., Any]) -> None:
        self.count = 0
        self.guidance = 1.0
        self._of = of

    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        COUNTS.append(args)
        return self._of(self, *args, **kwargs)


COUNTS: list[Any] = []


def encoded(cache: EncodingCache, of: Callable[..., Any], *args: Any, adapters: Any = (), **state: Any) -> Any:
    """One call of a view of its own. `state` is what the pipeline set before it."""
    view = Encoders(of)
    cache.attach(view, adapters)
    vars(view).update(state)
    return view.encode_prompt(*args)


def computed(cache: EncodingCache, of: Callable[..., Any], *asked: Any, **more: Any) -> int:
    """How many of the calls were computed."""
    COUNTS.clear()
    for each in asked:
        encoded(cache, of, each, **more)
    return len(COUNTS)


def rows(pipeline: Any, prompt: Any) -> tuple[torch.Tensor, None]:
    return torch.full((4, 8), float(len(repr(prompt)))), None


def test_callers_share_no_memory() -> None:
    cache = EncodingCache("test", 1024)
    for _ in range(3):
        states, nothing = encoded(cache, rows, "a")
        assert (states == 3).all()
        assert nothing is None
        states += 1


def test_all_that_a_result_depends_on_tells_calls_apart() -> None:
    cache = EncodingCache("test", 1 << 20)
    zeros = torch.zeros(2)
    others = [1, 1.0, True, "1", None, [1], (1,), {"a": 1}, zeros, zeros.half(), zeros.reshape(1, 2), PICTURE]
    assert computed(cache, rows, *others) == len(others)
    assert computed(cache, rows, *others) == 0
    assert computed(cache, rows, PICTURE.transpose(Image.Transpose.ROTATE_90)) == 1
    assert computed(cache, rows, 1, adapters=(("fox", 0.5),)) == 1
    assert computed(cache, rows, 1, guidance=2.0) == 1
    assert computed(cache, rows, 1, guidance=2.0) == 0


def test_what_may_give_something_else_is_not_kept() -> None:
    cache = EncodingCache("test", 1 << 20)

    def draws(pipeline: Any, prompt: Any) -> torch.Tensor:
        return torch.randn(2)

    def remembers(pipeline: Any, prompt: Any) -> torch.Tensor:
        pipeline.count += 1
        return torch.zeros(2)

    def of_unknown_kind(pipeline: Any, prompt: Any) -> Any:
        return object()

    def read_otherwise(pipeline: Any, prompt: Any) -> torch.Tensor:
        return torch.zeros(1, 4).expand(3, 4)

    for of in (draws, remembers, of_unknown_kind, read_otherwise):
        assert computed(cache, of, "a", "a") == 2, of.__name__
    assert computed(cache, rows, torch.Generator(), torch.Generator()) == 2
    assert computed(cache, rows, "a", "a", guider=object()) == 2


def test_a_failed_call_is_not_kept() -> None:
    cache = EncodingCache("test", 1 << 20)

    def fails(pipeline: Any, prompt: Any) -> Any:
        raise ValueError(prompt)

    for _ in range(2):
        COUNTS.clear()
        with pytest.raises(ValueError, match="fox"):
            encoded(cache, fails, "fox")
        assert len(COUNTS) == 1


def test_what_two_calls_compute_at_a_time_counts_once() -> None:
    one_bytes = 4 * 8 * 4
    cache = EncodingCache("test", 2 * one_bytes)

    def meanwhile(pipeline: Any, prompt: Any) -> Any:
        if len(COUNTS) == 1:  # the first call is interrupted by the second
            encoded(cache, meanwhile, prompt)
        return rows(pipeline, prompt)

    assert computed(cache, meanwhile, "a") == 2
    assert REGISTRY.get_sample_value("quartet_encoding_cache_bytes", {"stage": "test"}) == one_bytes
    assert computed(cache, rows, "b", "a") == 1  # there is room for both


def test_the_latest_are_kept_and_no_more_bytes_than_said() -> None:
    one_bytes = 4 * 8 * 4
    cache = EncodingCache("test", 2 * one_bytes)
    assert computed(cache, rows, "a", "b", "a", "c") == 3
    assert computed(cache, rows, "a") == 0
    assert computed(cache, rows, "b") == 1  # the least lately used
    assert REGISTRY.get_sample_value("quartet_encoding_cache_bytes", {"stage": "test"}) == 2 * one_bytes

    def large(pipeline: Any, prompt: Any) -> torch.Tensor:
        return torch.zeros(65, 8)

    assert computed(cache, large, "large", "large") == 2
    assert computed(cache, rows, "a", "b") == 0  # it took nobody's place
