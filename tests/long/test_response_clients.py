"""Responses of a thinker, a talker, a code2wav and a dit together: pictures that are asked for and changed in a chat;
and other people's libraries, unmodified."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from cli.plan import OMNI_DIT_PIPELINE
from tests.support.clients.anthropic import anthropic_report
from tests.support.clients.environments import CLIENTS, python_with, report_of
from tests.support.samples.media import png
from tests.support.systems.stack import Stack, running
from tests.support.weights.checkpoints import diffusion_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.weekly]
TIMEOUT_S = 200  # a guard
SEEDS = range(16)  # a random model's prompt can be longer than what its dit reads


@pytest.fixture(scope="module")
def stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ("--pipeline", str(OMNI_DIT_PIPELINE), "--dit-model", str(diffusion_checkpoint("sd3")))
    flags += ("--gateway-arg=--hosted-tools=image_generation",)
    flags += ("--gateway-arg=--model-name=tiny",)  # the Agents SDK reads what is before a slash as a provider
    with running(tiny_checkpoint, tmp_path_factory.mktemp("four") / "run", *flags) as started:
        yield started


def painted(stack: Stack, action: str, previous: str | None) -> Any:
    """A response that has a picture, by OpenAI's client, which puts the stream together."""
    client: Any = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)
    tool = {"type": "image_generation", "action": action, "size": "64x48", "partial_images": 1}
    for seed in SEEDS:
        asked = client.responses.stream(
            model=stack.model,
            input="a cat",
            previous_response_id=previous,
            tools=[tool],
            tool_choice={"type": "image_generation"},
            max_tool_calls=1,
            max_output_tokens=512,
            extra_body={"seed": seed},
        )
        with asked as events:
            told = list(events)
        response = told[-1].response
        if response.output and getattr(response.output[0], "result", None):
            assert [event.partial_image_index for event in told if event.type.endswith("partial_image")] == [0]
            return response
    raise AssertionError("no picture was made")


def decoded(image_base64: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(image_base64))).convert("RGB"), np.int16)


def pixels(response: Any) -> np.ndarray:
    return decoded(response.output[0].result)


def test_a_picture_is_asked_for_in_a_chat_and_changed_in_the_next_turn(stack: Stack) -> None:
    first = painted(stack, "generate", None)
    assert pixels(first).shape == (48, 64, 3)
    assert [item.type for item in first.output] == ["image_generation_call", "message"]
    second = painted(stack, "edit", first.id)
    assert second.output[0].action == "edit"
    assert np.abs(pixels(first) - pixels(second)).max() > 0


def drawn(stack: Stack, action: str, messages: list[Any]) -> dict[str, Any]:
    """A chat's message that has a picture."""
    tool = {"type": "image_generation", "action": action, "size": "64x48"}
    body = {"model": stack.model, "messages": messages, "tools": [tool], "max_tokens": 512}
    for seed in SEEDS:
        asked = body | {"seed": seed, "tool_choice": {"type": "image_generation"}}
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=asked, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        if message.get("images"):
            return message
    raise AssertionError("no picture was made")


def test_a_chat_draws_and_changes_what_it_drew(stack: Stack) -> None:
    def shown(message: dict[str, Any]) -> np.ndarray:
        return decoded(message["images"][0]["image_url"]["url"].partition(",")[2])

    user = {"role": "user", "content": "a cat"}
    first = drawn(stack, "generate", [user])
    second = drawn(stack, "edit", [user, first, {"role": "user", "content": "make it blue"}])
    assert shown(first).shape == (48, 64, 3)
    assert np.abs(shown(first) - shown(second)).max() > 0


@pytest.mark.parametrize("program", ["agents_answers", "langchain_answers"])
def test_another_library_asks_and_answers_calls(stack: Stack, program: str) -> None:
    url = f"{stack.url}/v1"
    access = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": url}
    report = report_of(python_with("openai"), CLIENTS / f"{program}.py", url, stack.model, **access)
    assert report["calls"]
    assert all(isinstance(call["on"], bool) for call in report["calls"])
    assert all(report["texts"])


def test_anthropics_library_asks_and_answers_calls(stack: Stack, tmp_path: Path) -> None:
    """Tools, images, a stream, a count and a refusal."""
    (tmp_path / "seen.png").write_bytes(png())
    report = anthropic_report(stack.url, str(tmp_path / "seen.png"))
    assert report["calls"]
    assert all(isinstance(call["on"], bool) for call in report["calls"])
    assert all(report["texts"])
    assert [counted == read for counted, read in report["counts"]] == [True]
    kind, request_id, message = report["refused"]
    assert (kind, request_id[:4]) == ("invalid_request_error", "req_")
    assert "modle: unknown parameter" in message
