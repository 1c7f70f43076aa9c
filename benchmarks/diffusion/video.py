"""An image during a video: how long it waits, and how much it delays the video, in the video's own steps."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.diffusion.sides import Quartet, Received, receive
from benchmarks.diffusion.work import Wish, apart

SENT_AFTER_STEP = 3
PASSED = "the video's steps done before the picture's first"
TITLES = {
    "first_step": "the picture's first step done",
    "end": "the picture done",
    "alone": "the picture done, with nothing else running",
    "rest": "the rest of the video alone, which the picture would wait for in a line",
    "decoding": "of which decoding, after the last step",
    "delay": "the video done later than in a run of its own",
}


@dataclass(frozen=True)
class During:
    """One round. Times from when the image was sent, in steps of the video in a run of its own; `delay` likewise.

    Attributes:
        step_ms: of the video alone.
        passed: steps of the video that ended between the image's sending and the end of its first step: a count.
        apart: most steps of 8 bit pixels between the two videos, or the two images, with and without the other.
    """

    step_ms: float
    passed: float
    first_step: float
    end: float
    alone: float
    rest: float
    decoding: float
    delay: float
    apart: int


def measure(side: Quartet, video: Wish, rounds: int) -> list[During]:
    """Each round: the video, the image, and both. The first, which warms up, does not count.

    Args:
        video: of at least SENT_AFTER_STEP + 1 steps. The image has the same size and steps, and one frame.
    """
    picture = replace(video, seed=video.seed + 1, size=replace(video.size, frames=1))
    return [side.call(lambda stub: _round(stub, video, picture)) for _ in range(rounds + 1)][1:]


async def _round(stub: Any, video: Wish, picture: Wish) -> During:
    video_alone, picture_alone = await receive(stub, video), await receive(stub, picture)
    is_time = asyncio.Event()
    running = asyncio.create_task(receive(stub, video, lambda step: step == SENT_AFTER_STEP and is_time.set()))
    waiting = asyncio.create_task(is_time.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    sent_s = time.perf_counter()
    small = await receive(stub, picture)
    both = await running
    step_s = video_alone.step_s
    return During(
        step_s * 1000,
        float(sum(sent_s < done_s <= small.steps_s[1] for done_s in both.steps_s.values())),
        (small.steps_s[1] - sent_s) / step_s,
        (small.done_s - sent_s) / step_s,
        _total_s(picture_alone) / step_s,
        (video_alone.done_s - video_alone.steps_s[SENT_AFTER_STEP]) / step_s,
        (video_alone.done_s - max(video_alone.steps_s.values())) / step_s,
        (_total_s(both) - _total_s(video_alone)) / step_s,
        apart([both.output(), small.output()], [video_alone.output(), picture_alone.output()]),
    )


def _total_s(received: Received) -> float:
    return received.done_s - received.sent_s


def medians(rounds: Sequence[During]) -> dict[str, float]:
    """Of each figure."""
    return {field.name: median(getattr(each, field.name) for each in rounds) for field in fields(During)}


def table(rounds: Sequence[During]) -> Table:
    """The figures, medians of rounds."""
    values = medians(rounds)
    shown = Table()
    shown.add_column(f"picture sent after the video's step {SENT_AFTER_STEP}")
    shown.add_column("steps of\nthe video", justify="right")
    shown.add_column("ms", justify="right")
    shown.add_row(PASSED, f"{values['passed']:g}", "")
    for name, title in TITLES.items():
        shown.add_row(title, f"{values[name]:.2f}", f"{values[name] * values['step_ms']:.1f}")
    return shown


def to_json(rounds: Sequence[During]) -> dict[str, Any]:
    """All of it."""
    return {"medians": medians(rounds), "rounds": [asdict(each) for each in rounds]}
