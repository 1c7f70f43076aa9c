"""Cosmos 3 by two stages, each with its half: what one of them loses is not the other's, and is whole again."""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from gateway.pipelines import SHIPPED
from tests.support.systems.handed_over import (
    ABORTS,
    GENERATIONS,
    HEARD_WITHIN_S,
    abort,
    check_error,
    held,
    picture,
)
from tests.support.systems.stack import Stack, running, until
from tests.support.weights.checkpoints import diffusion_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.weekly]
STAGES = ("thinker", "dit")
CHATS = "/v1/chat/completions"
QUICK: dict[str, Any] = {"prompt": "a harbor", "size": "64x48", "num_inference_steps": 3, "seed": 3}
LONG = QUICK | {"num_inference_steps": 200}
SAYS: dict[str, Any] = {"messages": [{"role": "user", "content": "What do you see?"}], "temperature": 0}
SAYS_LITTLE = SAYS | {"max_tokens": 8}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder, checkpoint = tmp_path_factory.mktemp("cosmos"), diffusion_checkpoint("cosmos3")
    flags = [
        f"--dit-model={checkpoint}",
        f"--pipeline={SHIPPED / 'text-dit.yaml'}",
        f"--gateway-arg=--jobs-dir={folder / 'jobs'}",
        "--thinker-arg=--kv-cache-bytes=16777216",
    ]
    with running(checkpoint, folder / "run", *flags) as started:
        yield started


def said(system: Stack) -> str:
    answer = system.http.post(CHATS, json=SAYS_LITTLE)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_a_dit_that_is_killed_leaves_the_thinker_alone(system: Stack) -> None:
    before, words = picture(system.http.post(GENERATIONS, json=QUICK)), said(system)
    with ThreadPoolExecutor() as clients:
        asked = clients.submit(lambda: (system.http.post(GENERATIONS, json=LONG), time.monotonic()))
        until(lambda: system.metric("dit", "quartet_dit_outputs_running"), "it is painted")
        with system.held_up():
            killed = time.monotonic()
            os.kill(system.pid("dit"), signal.SIGKILL)
            answer, heard = asked.result()
            assert said(system) == words
    check_error(answer, "dit")
    assert heard - killed < HEARD_WITHIN_S
    until(system.ready, "both stages serve again")
    assert not held(system, STAGES)
    assert np.array_equal(picture(system.http.post(GENERATIONS, json=QUICK)), before)


async def test_a_hundred_aborts_at_random_moments_leave_nothing(system: Stack) -> None:
    chance = random.Random(0)
    before, words = picture(system.http.post(GENERATIONS, json=QUICK)), said(system)
    requests = [
        (LONG | {"prompt": f"a boat, {chance.randrange(20)}"}, chance.uniform(0.0, chance.choice((0.05, 0.6))))
        for _ in range(ABORTS)
    ]
    assert await abort(system.url, requests, at_a_time=4) == ABORTS
    until(lambda: not held(system, STAGES), "no request holds anything")
    assert system.cancelled("dit")
    assert np.array_equal(picture(system.http.post(GENERATIONS, json=QUICK)), before)
    assert said(system) == words
