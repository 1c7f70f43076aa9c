"""Clients that leave and stages that die: everything is freed, the client hears of it, the next request works."""

import asyncio
import base64
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.support.clients.speech import events, speech
from tests.support.systems.gateway import NOT_FOR_CLIENTS
from tests.support.systems.stack import HANG_GUARD_S, Stack, running, until
from tests.support.weights.checkpoints import omni_checkpoint

pytestmark = pytest.mark.e2e

PHASES = ("prefill", "text", "audio", "whole")  # how far a request is when the stage dies; "whole" does not stream


SHORT = speech("", stream=False, max_tokens=8, quartet={"talker": {"temperature": 1, "seed": 3, "max_frames": 8}})


@pytest.fixture(scope="module", params=["qwen3-omni", pytest.param("qwen2.5-omni", marks=pytest.mark.weekly)])
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def stack(arch: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The system that all share; and one of the family whose decoder looks ahead and draws noise."""
    if arch == "qwen3-omni":
        yield request.getfixturevalue("stack")
        return
    with running(omni_checkpoint(arch=arch), tmp_path_factory.mktemp("run")) as started:
        yield started


def ask(stack, body: dict) -> httpx.Response:
    return stack.http.post("/v1/chat/completions", json=body)


def kind(event: dict) -> str | None:
    for choice in event.get("choices", ()):
        if (choice["delta"].get("audio") or {}).get("data"):
            return "audio"
        if choice["delta"].get("content"):
            return "text"
    return None


@pytest.mark.parametrize("moment", ["prefill", "decode", "speech"])
async def test_a_disconnect_frees_all_stages(stack, moment):
    until(lambda: sum(stack.in_flight().values()) == 0, "idle before the test")
    cancelled = stack.cancelled("thinker")
    if moment == "prefill":
        body = speech(stack.model, messages=[{"role": "user", "content": "sea " * 3000}])
        async with httpx.AsyncClient(base_url=stack.url, headers=stack.http.headers, timeout=HANG_GUARD_S) as client:
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            while not stack.in_flight()["thinker"]:
                await asyncio.sleep(0)
            asked.cancel()
    else:
        wanted = "text" if moment == "decode" else "audio"
        with stack.http.stream("POST", "/v1/chat/completions", json=speech(stack.model)) as response:
            arriving = events(response)
            assert any(kind(event) == wanted for event in arriving)
            assert stack.in_flight()["thinker"] + stack.in_flight()["talker"] > 0
    until(lambda: sum(stack.in_flight().values()) == 0, "all stages are free")
    # it was given up, not brought to its end; which a stage counts last
    until(lambda: stack.cancelled("thinker") > cancelled, "the thinker's was given up")


def error_of(stack, phase: str, reached: threading.Barrier) -> dict:
    """The error that ends a request; all meet when each is in its phase."""
    body = speech(stack.model, stream=phase != "whole")
    if phase == "prefill":
        body["messages"] = [{"role": "user", "content": "sea " * 3000}]
    with ThreadPoolExecutor() as waiting:
        if phase in ("prefill", "whole"):
            waiting.submit(reached.wait)
        with stack.http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                assert response.status_code == 503
                assert response.headers["retry-after"] == "1"
                return json.loads(response.read())["error"]
            arriving = events(response)
            if phase in ("text", "audio"):
                assert any(kind(event) == phase for event in arriving)
                waiting.submit(reached.wait)
            return next(event["error"] for event in arriving if "error" in event)


# Those take ten seconds and more to come back.
SLOW_STAGES = [pytest.param(stage, marks=pytest.mark.long) for stage in ("thinker", "talker")]


@pytest.mark.parametrize("stage", [*SLOW_STAGES, "code2wav"])
def test_a_killed_stage_is_named_to_every_client_and_comes_back(stack, arch, stage):
    if (arch, stage) == ("qwen2.5-omni", "thinker"):
        pytest.skip("dies and starts as the other family's")
    until(stack.ready, "ready before the test")
    assert ask(stack, SHORT | {"model": stack.model}).status_code == 200  # every process is paged in and in its stride
    reached = threading.Barrier(len(PHASES) + 1, timeout=HANG_GUARD_S)
    with ThreadPoolExecutor() as clients:
        asked = {phase: clients.submit(error_of, stack, phase, reached) for phase in PHASES}
        reached.wait()
        until(lambda: stack.in_flight()[stage] == len(PHASES), "all of them are there")
        with stack.held_up():  # nobody starts it anew
            os.kill(stack.pid(stage), signal.SIGKILL)
            errors = {phase: future.result() for phase, future in asked.items()}
            until(lambda: not stack.ready(), "/ready turns 503")
            refused = stack.http.post("/v1/chat/completions", json=speech(stack.model, stream=False))
    for phase, error in errors.items():
        assert error["code"] == "stage_unavailable", (phase, error)
        assert error["type"] == "service_unavailable_error"
        assert error["message"] == f"the {stage} went away while it answered; try again in 1 s", phase
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert stage in refused.json()["error"]["message"]
    assert not NOT_FOR_CLIENTS.search(refused.text), refused.text
    until(stack.ready, "/ready turns 200")
    answer = ask(stack, SHORT | {"model": stack.model})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["audio"]["data"]


def test_many_abandoned_requests_leak_nothing(stack):
    until(stack.ready, "ready before the test")

    def abandon(i: int) -> None:
        with stack.http.stream("POST", "/v1/chat/completions", json=speech(stack.model)) as response:
            for n, event in enumerate(events(response)):
                assert "error" not in event, event
                if n >= i % 7:
                    return

    for _ in range(5):
        threads = [threading.Thread(target=abandon, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_GUARD_S)
    until(lambda: sum(stack.in_flight().values()) == 0, "free")
    assert ask(stack, SHORT | {"model": stack.model}).status_code == 200


def test_sound_comes_while_the_text_is_still_written(stack):
    with stack.http.stream("POST", "/v1/chat/completions", json=speech(stack.model)) as response:
        arriving = events(response)  # to be kept: the response ends with it
        assert any(kind(event) == "audio" for event in arriving)
        assert stack.in_flight()["thinker"]
    until(lambda: sum(stack.in_flight().values()) == 0, "free")


@pytest.mark.long
def test_32_spoken_answers_at_a_time_are_whole(stack):
    """With a seed each says the same among others as alone."""

    def say(i: int) -> tuple[str, bytes]:
        talker = {"temperature": 1, "seed": i % 2, "max_frames": 60}
        body = speech(stack.model, stream=False, max_tokens=30, quartet={"talker": talker})
        body |= {"messages": [{"role": "user", "content": f"Tell me of {i % 4} boats."}], "audio": {"format": "wav"}}
        answer = ask(stack, body)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        return message["audio"]["transcript"], base64.b64decode(message["audio"]["data"])

    alone = [say(i) for i in range(4)]
    with ThreadPoolExecutor(32) as clients:
        together = list(clients.map(say, range(32)))
    for i, (text, sound) in enumerate(together):
        assert text == alone[i % 4][0]
        ours, expected = (np.frombuffer(data[44:], np.int16).astype(int) for data in (sound, alone[i % 4][1]))
        assert len(ours) == len(expected) > 0
        assert abs(ours - expected).max() <= 2  # of 32,768: a batch adds in another order
