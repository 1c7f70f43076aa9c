"""`/v1/responses` before real stages, by OpenAI's client: what it answers is what chat answers."""

import base64
import json
from typing import Any

import numpy as np
import openai
import pytest

from tests.support.samples.media import png
from tests.support.systems.stack import Stack, until

pytestmark = pytest.mark.e2e

FIRST, SECOND = "What do you see?", "And what is the sea like?"
GREEDY = {"temperature": 0}
SPOKEN = {"modalities": ["text", "audio"], "quartet": {"talker": {"temperature": 0, "max_frames": 24}}}
LAMP = {
    "name": "lamp",
    "parameters": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(stack: Stack) -> Any:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key, max_retries=0, timeout=120)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_two_turns_are_those_of_a_chat(stack: Stack, client: Any) -> None:
    chat, said = [], [user(FIRST)]
    for _ in range(2):
        answer = client.chat.completions.create(model=stack.model, messages=said, max_tokens=12, **GREEDY)
        chat.append(answer.choices[0].message.content)
        said += [{"role": "assistant", "content": chat[-1]}, user(SECOND)]
    asked = {"model": stack.model, "max_output_tokens": 12, **GREEDY}
    first = client.responses.create(input=FIRST, **asked)
    with client.responses.stream(input=SECOND, previous_response_id=first.id, **asked) as events:
        told = list(events)
    deltas, second = "".join(e.delta for e in told if e.type == "response.output_text.delta"), told[-1].response
    assert [first.output_text, second.output_text] == chat
    assert deltas == second.output_text
    assert (first.status, second.usage.output_tokens) == ("incomplete", 12)
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_input_tokens_are_those_that_a_response_has(stack: Stack, client: Any) -> None:
    picture = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    parts = [{"type": "input_image", "image_url": picture}, {"type": "input_text", "text": FIRST}]
    asked = {"model": stack.model, "instructions": "Be brief.", "tools": [{"type": "function", **LAMP}]}
    asked["input"] = [{"role": "user", "content": parts}]
    counted = client.responses.input_tokens.count(**asked).input_tokens
    assert client.responses.create(max_output_tokens=1, **asked).usage.input_tokens == counted
    plain = client.responses.input_tokens.count(model=stack.model, input=FIRST).input_tokens
    assert 0 < plain < counted


def test_the_sound_is_that_of_a_chat(stack: Stack, client: Any) -> None:
    asked = {"model": stack.model, "max_tokens": 32, **GREEDY, **SPOKEN, "audio": {"format": "pcm16"}}
    chat = stack.http.post("/v1/chat/completions", json=asked | {"messages": [user(FIRST)]}).json()
    events = client.responses.create(model=stack.model, input=FIRST, stream=True, extra_body=asked | {"stream": True})
    sound = b"".join(base64.b64decode(event.delta) for event in events if event.type == "response.audio.delta")
    spoken = base64.b64decode(chat["choices"][0]["message"]["audio"]["data"])
    heard, expected = (np.frombuffer(pcm, "<i2").astype(int) for pcm in (sound, spoken))
    assert np.abs(heard - expected).max() <= 1  # two requests: the last bit depends on how their frames came together


def test_a_call_is_forced_and_answered(stack: Stack, client: Any) -> None:
    asked = {"model": stack.model, "tools": [{"type": "function", **LAMP}], **GREEDY}
    choice = {"type": "function", "name": "lamp"}
    called = client.responses.create(input="light", tool_choice=choice, max_output_tokens=64, **asked)
    (call,) = called.output
    assert isinstance(json.loads(call.arguments)["on"], bool)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    more = {"previous_response_id": called.id, "tool_choice": "none", "max_output_tokens": 8}
    assert client.responses.create(input=[result], **more, **asked).output_text


def test_a_response_of_the_background_is_cancelled_in_the_stage(stack: Stack, client: Any) -> None:
    endless = {"ignore_eos": True}
    made = client.responses.create(model=stack.model, input=FIRST, background=True, extra_body=endless)
    until(lambda: stack.in_flight()["thinker"], "the thinker works on it")
    assert client.responses.cancel(made.id).status == "cancelled"
    until(lambda: not stack.in_flight()["thinker"], "the thinker has nothing left")
