"""How many videos are made at a time, over all workers of a gateway."""

import asyncio
from pathlib import Path

import pytest

from gateway.access.shared import SharedState
from gateway.answers.video_places import VideoPlaces
from services.common.errors import QueueFull


def places_of(tmp_path: Path, running: int, queued: int) -> list[VideoPlaces]:
    """Those of two workers."""
    states = [SharedState(tmp_path / "counts.sqlite", worker) for worker in range(2)]
    return [VideoPlaces(state, running, queued) for state in states]


async def test_the_first_to_come_are_made_whoever_took_them_on(tmp_path: Path):
    first, second = places_of(tmp_path, 2, 2)
    for places, video in ((first, "a"), (second, "b"), (second, "c"), (first, "d")):
        places.take(video)
    for places in (first, second):
        with pytest.raises(QueueFull, match="2 videos are being made and 2 wait"):
            places.take("e")
    await first.reach_front("a")
    await second.reach_front("b")
    third = asyncio.create_task(second.reach_front("c"))
    fourth = asyncio.create_task(first.reach_front("d"))
    await asyncio.sleep(0)
    first.give_back("a")
    await third
    await asyncio.sleep(0.3)  # longer than until it looks again
    assert not fourth.done()
    second.give_back("c")
    await fourth
    first.take("e")


async def test_who_waits_and_leaves_lets_those_behind_pass(tmp_path: Path):
    first, second = places_of(tmp_path, 1, 5)
    for places, video in ((first, "a"), (first, "b"), (second, "c")):
        places.take(video)
    last = asyncio.create_task(second.reach_front("c"))
    first.give_back("b")
    await asyncio.sleep(0.3)
    assert not last.done()
    first.give_back("a")
    await last


async def test_a_worker_that_starts_anew_has_given_back_its_places(tmp_path: Path):
    first, second = places_of(tmp_path, 1, 1)
    first.take("a")
    second.take("b")
    waiting = asyncio.create_task(second.reach_front("b"))
    SharedState(tmp_path / "counts.sqlite", 0)  # worker 0 was killed
    await waiting
    second.take("c")
