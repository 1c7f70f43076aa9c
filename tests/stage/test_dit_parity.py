"""What the dit makes equals what diffusers' own pipeline makes, alone and among others, for every family."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from quartet.v1 import dit_pb2
from tests.support.families import IN_PROCESS, small_edits
from tests.support.stage.dit_engine import Bench, bench, fresh, reference
from tests.support.weights.checkpoints import diffusion_checkpoint

__all__ = ["small_edits"]  # the fixture

pytestmark = pytest.mark.usefixtures("small_edits")
TOLERANCE = 1e-4
PROMPTS = ("a red fox", "a much longer prompt about a blue house by the sea, at night, in the rain", "x")
EXTRA: dict[str, dict[str, Any]] = {
    "wan": {"num_frames": 5},
    "wan-i2v": {"num_frames": 5},
    "stable-audio": {"audio_s": 0.2},
}
TAKES_IMAGE = ("qwen-image-edit", "wan-i2v")


def picture(seed: int, size: tuple[int, int] = (64, 64)) -> Image.Image:
    torch.manual_seed(seed)
    coarse = torch.randint(0, 255, (8, 8, 3), dtype=torch.uint8).numpy()
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture(scope="module", params=IN_PROCESS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family: str) -> Path:
    return diffusion_checkpoint(family)


@pytest.fixture(scope="module")
def dit(checkpoint: Path):
    with bench(checkpoint) as started:
        yield started


def orders(dit: Bench, family: str) -> list[Any]:
    """Three requests that differ in prompt, seed, guidance and steps; the last has two outputs."""
    made = []
    for i, prompt in enumerate(PROMPTS):
        start = dit_pb2.DitStart(prompt=prompt, seed=i, num_inference_steps=3 + i % 2, guidance_scale=1.5 + i)
        start.count = 2 if i == 2 else 1
        for key, value in EXTRA.get(family, {}).items():
            setattr(start, key, value)
        if family != "stable-audio":
            start.width = start.height = 64
        if dit.info.negative_prompt and i == 1:
            start.negative_prompt = "fog"
        made += dit.orders(start, [picture(i)] if family in TAKES_IMAGE else [])
    return made


def test_alone_and_among_others(dit: Bench, family: str, checkpoint: Path) -> None:
    wanted_orders = orders(dit, family)
    pipeline = fresh(checkpoint)
    wanted = [reference(pipeline, order) for order in wanted_orders]
    assert all(data.std() > 0.01 for data in wanted)
    assert (wanted[2] - wanted[3]).abs().max() > 0.01  # another seed

    alone = [dit.make([order])[0] for order in wanted_orders]
    for mine, theirs in zip(alone, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)

    watched = dit.submit_together(wanted_orders)
    for mine, theirs in zip(dit.finish(watched), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
    assert max(max(w.batches) for w in watched) >= 2, "no step was shared"


def test_edits_and_masks(dit: Bench, checkpoint: Path) -> None:
    for kind in {"edit", "inpaint"} & dit.engine.models.pipelines.keys():
        check_edit(dit, checkpoint, kind)


def check_edit(dit: Bench, checkpoint: Path, kind: str) -> None:
    start = dit_pb2.DitStart(prompt="a red fox", seed=5, num_inference_steps=4, width=64, height=64, count=2)
    mask = half((64, 64)) if kind == "inpaint" else None
    wanted_orders = dit.orders(start, [picture(9)], mask)
    cls = getattr(diffusers, type(wanted_orders[0].pipeline).__name__)
    pipeline = cls.from_pipe(fresh(checkpoint))
    wanted = [reference(pipeline, order) for order in wanted_orders]
    for mine, theirs in zip(dit.make(wanted_orders), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
    if dit.engine.models.family.edit:  # other families look at the whole picture, at a size of their own
        check_size(dit, pipeline, start, picture(9, (80, 48)), half((80, 48)) if mask else None)


def check_size(dit: Bench, pipeline: Any, start: dit_pb2.DitStart, *files: Image.Image | None) -> None:
    """Of a picture of another size than asked for: what diffusers makes of the picture at that size."""
    start.count = 1
    given, mask = files
    small = [each and each.resize((start.width, start.height), Image.Resampling.LANCZOS) for each in files]
    (wanted,) = dit.orders(start, [small[0]], small[1])
    (mine,) = dit.make(dit.orders(start, [given], mask))
    torch.testing.assert_close(mine, reference(pipeline, wanted), atol=TOLERANCE, rtol=0)


def half(size: tuple[int, int]) -> Image.Image:
    """A mask of the left half."""
    mask = Image.new("L", size, 0)
    mask.paste(255, (0, 0, size[0] // 2, size[1]))
    return mask
