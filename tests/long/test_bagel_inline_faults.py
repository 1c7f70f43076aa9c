"""BAGEL in two processes whose tensors go inline: what test_bagel_faults.py shows, at other moments."""

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
    HandedOver,
    check_aborts,
    check_all_is_back,
    check_error,
    handing_over,
    picture,
)
from tests.support.systems.stack import until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.weekly]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandedOver]:
    """With a cache of encodings, which a request that is left must not spoil."""
    with handing_over(tmp_path_factory.mktemp("bagel"), shared_memory=False, cache_mib=1) as started:
        yield started


async def test_a_hundred_aborts_at_random_moments_leave_nothing(pair: HandedOver) -> None:
    await check_aborts(pair, random.Random(1))
    assert pair.transport() == "inline"


def test_a_dit_that_is_killed_while_it_denoises(pair: HandedOver) -> None:
    system, body = pair.system, LONG | {"prompt": "a picture that is not finished"}
    whole = picture(pair.ask(body))
    with ThreadPoolExecutor() as clients:
        asked = clients.submit(pair.answered, body)
        until(lambda: system.metric("dit", "quartet_dit_outputs_running"), "it is painted")
        with system.held_up():
            killed = time.monotonic()
            os.kill(system.pid("dit"), signal.SIGKILL)
            heard, answer = asked.result()
    check_error(answer, "dit")
    assert heard - killed < HEARD_WITHIN_S
    check_all_is_back(pair)
    assert np.array_equal(picture(pair.ask(body)), whole)
