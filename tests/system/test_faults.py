"""Clients that leave and stages that die: everything is freed, the client hears of it, the next request works."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.gateway_stack import NOT_FOR_CLIENTS

pytestmark = pytest.mark.e2e

LONG_SPEECH = {"temperature": 1, "seed": 3, "max_frames": 2000}  # on the tiny checkpoint: more than a hundred frames
STAGES = ("thinker", "talker", "code2wav")
PHASES = ("prefill", "text", "audio", "whole")  # how far a request is when the stage dies; "whole" does not stream


def speech(model: str, **change) -> dict:
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        "stream": True,
        "temperature": 0,
        "max_tokens": 2000,
        "ignore_eos": True,
        "quartet": {"talker": LONG_SPEECH},
        **change,
    }


SHORT = speech("", stream=False, max_tokens=8, quartet={"talker": LONG_SPEECH | {"max_frames": 8}})


def ask(stack, body: dict) -> httpx.Response:
    return httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60)


@pytest.fixture(scope="module")
def model(stack) -> str:
    return httpx.get(f"{stack.url}/v1/models").json()["data"][0]["id"]


def until(condition, timeout_s: float, what: str) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def events(response: httpx.Response):
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def kind(event: dict) -> str | None:
    for choice in event.get("choices", ()):
        if (choice["delta"].get("audio") or {}).get("data"):
            return "audio"
        if choice["delta"].get("content"):
            return "text"
    return None


@pytest.mark.parametrize("moment", ["prefill", "decode", "speech"])
def test_a_disconnect_frees_all_stages_within_a_second(stack, model, moment):
    until(lambda: sum(stack.in_flight().values()) == 0, 10, "idle before the test")
    if moment == "prefill":
        body = speech(model, messages=[{"role": "user", "content": "sea " * 3000}])
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=httpx.Timeout(10, read=0.1))
    else:
        wanted = "text" if moment == "decode" else "audio"
        with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=speech(model), timeout=60) as response:
            arriving = events(response)
            assert any(kind(event) == wanted for event in arriving)
            assert stack.in_flight()["thinker"] + stack.in_flight()["talker"] > 0
    # one second, and what a scrape of three metrics pages takes on a busy machine
    until(lambda: sum(stack.in_flight().values()) == 0, 2, f"free after {stack.in_flight()}")


def error_of(stack, model: str, phase: str, reached: threading.Barrier) -> tuple[dict, float]:
    """The error that ends a request, and when it came (time.monotonic() s); all meet when each is in its phase."""
    body = speech(model, stream=phase != "whole")
    if phase == "prefill":
        body["messages"] = [{"role": "user", "content": "sea " * 3000}]
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor() as waiting:
        if phase in ("prefill", "whole"):
            waiting.submit(reached.wait)
        with client.stream("POST", f"{stack.url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                failed_at = time.monotonic()
                assert response.status_code == 503
                assert response.headers["retry-after"] == "1"
                return json.loads(response.read())["error"], failed_at
            arriving = events(response)
            if phase in ("text", "audio"):
                assert any(kind(event) == phase for event in arriving)
                waiting.submit(reached.wait)
            return next(event["error"] for event in arriving if "error" in event), time.monotonic()


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_is_named_to_every_client_at_once_and_comes_back(stack, model, stage):
    until(stack.ready, 60, "ready before the test")
    assert ask(stack, SHORT | {"model": model}).status_code == 200  # every process is paged in and in its stride
    reached = threading.Barrier(len(PHASES) + 1, timeout=60)
    with ThreadPoolExecutor() as clients:
        asked = {phase: clients.submit(error_of, stack, model, phase, reached) for phase in PHASES}
        reached.wait()
        until(lambda: stack.in_flight()[stage] == len(PHASES), 10, "all of them are there")
        killed = time.monotonic()
        os.kill(stack.pid(stage), signal.SIGKILL)
        errors = {phase: future.result() for phase, future in asked.items()}
    for phase, (error, failed_at) in errors.items():
        assert error["code"] == "stage_unavailable", (phase, error)
        assert error["type"] == "service_unavailable_error"
        assert error["message"] == f"the {stage} went away while it answered; try again in 1 s", phase
        assert failed_at - killed < 1, phase
    until(lambda: not stack.ready(), 1, "/ready turns 503")
    refused = httpx.post(f"{stack.url}/v1/chat/completions", json=speech(model, stream=False), timeout=10)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert stage in refused.json()["error"]["message"]
    assert not NOT_FOR_CLIENTS.search(refused.text), refused.text
    until(stack.ready, 90, "/ready turns 200")
    answer = ask(stack, SHORT | {"model": model})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["audio"]["data"]


def test_many_abandoned_requests_leak_nothing(stack, model):
    until(stack.ready, 60, "ready before the test")

    def abandon(i: int) -> None:
        with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=speech(model), timeout=60) as response:
            for n, event in enumerate(events(response)):
                assert "error" not in event, event
                if n >= i % 7:
                    return

    for _ in range(5):
        threads = [threading.Thread(target=abandon, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    until(lambda: sum(stack.in_flight().values()) == 0, 3, "free")
    assert ask(stack, SHORT | {"model": model}).status_code == 200
