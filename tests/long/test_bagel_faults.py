"""BAGEL in two processes: what a request hands from one to the other is free again, however it ends."""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.systems.handed_over import (
    HEARD_WITHIN_S,
    LONG,
    QUICK,
    HandedOver,
    check_aborts,
    check_all_is_back,
    check_error,
    handing_over,
    picture,
    thinks,
)
from tests.support.systems.stack import stopped, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.weekly]

READ = QUICK | {"prompt": "a plan that takes a while"} | thinks(500)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandedOver]:
    with handing_over(tmp_path_factory.mktemp("bagel"), shared_memory=True) as started:
        yield started


@pytest.fixture
def before(pair: HandedOver) -> np.ndarray:
    """The picture of READ."""
    made = picture(pair.ask(READ))
    assert pair.transport() == "shared_memory"
    return made


def test_an_encoder_that_is_killed_while_it_reads(pair: HandedOver) -> None:
    system, painted = pair.system, LONG | {"prompt": "a picture whose context has arrived"}
    plan = READ | thinks(1500)  # it takes longer than this process may be kept from the kill
    whole = picture(pair.ask(plan))
    with ThreadPoolExecutor() as clients:
        painting = clients.submit(pair.ask, painted)
        until(lambda: system.metric("dit", "quartet_dit_outputs_running"), "it is painted")
        reading = clients.submit(pair.answered, plan)
        until(lambda: system.metric("encoder", "quartet_requests_in_flight"), "it is read")
        with system.held_up():  # nobody starts it anew
            killed = time.monotonic()
            os.kill(system.pid("encoder"), signal.SIGKILL)
            heard, answer = reading.result()
            until(lambda: not system.ready(), "/ready turns 503")
            refused = pair.ask(READ)
            until(lambda: not system.metric("dit", "quartet_requests_in_flight"), "the dit waits for nothing")
    check_error(answer, "encoder")
    assert heard - killed < HEARD_WITHIN_S
    assert refused.status_code == 503
    check_all_is_back(pair)
    assert np.array_equal(picture(pair.ask(plan)), whole)
    assert np.array_equal(picture(painting.result()), picture(pair.ask(painted)))


def test_a_dit_that_is_killed_while_it_receives(pair: HandedOver, before: np.ndarray) -> None:
    system = pair.system
    with ThreadPoolExecutor() as clients:
        asked = clients.submit(pair.answered, READ)
        until(lambda: system.metric("encoder", "quartet_stream_credits_outstanding"), "the dit has subscribed")
        with system.held_up():
            with stopped(system.pid("dit")):  # it takes nothing of what is sent
                until(lambda: system.metric("encoder", "quartet_shared_memory_used_bytes"), "the context is sent")
                killed = time.monotonic()
                os.kill(system.pid("dit"), signal.SIGKILL)
            heard, answer = asked.result()
            until(lambda: not system.metric("encoder", "quartet_shared_memory_used_bytes"), "its memory is free")
    check_error(answer, "dit")
    assert heard - killed < HEARD_WITHIN_S
    check_all_is_back(pair)
    assert np.array_equal(picture(pair.ask(READ)), before)


async def test_a_hundred_aborts_at_random_moments_leave_nothing(pair: HandedOver) -> None:
    await check_aborts(pair, random.Random(0))
    assert pair.transport() == "shared_memory"
