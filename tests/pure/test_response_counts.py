"""`/v1/responses/input_tokens`: what a response's prompt would have, counted by the thinker; nothing is written."""

import asyncio
import base64
from typing import Any

import pytest

from services.common.errors import ContextTooLong, QueueFull
from tests.support.clients.responses import client, create, prompt, refusal
from tests.support.samples.media import png
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/responses/input_tokens"
LAMP = {"type": "function", "name": "lamp", "parameters": {"type": "object"}}


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


async def test_a_prompt_is_counted_and_nothing_is_written(gateway: Running) -> None:
    told = await client(gateway).responses.input_tokens.count(input="hi", instructions="Be brief.", tools=[LAMP])
    assert (told.object, told.input_tokens) == ("response.input_tokens", 10)
    (start,) = gateway.scripts["thinker"].requests
    assert (start.count_only, start.output_stream_id, [tool.name for tool in start.tools]) == (True, "", ["lamp"])
    assert prompt(gateway) == [("system", "Be brief."), ("user", "hi")]
    assert (await client(gateway).responses.input_tokens.count(model=None, input="hi")).input_tokens == 10


async def test_earlier_turns_and_pictures_are_part_of_it(gateway: Running) -> None:
    first = await create(gateway, "one")
    picture = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    parts = [{"type": "input_image", "image_url": picture, "detail": "auto"}, {"type": "input_text", "text": "two"}]
    asked = {"previous_response_id": first.id, "input": [{"role": "user", "content": parts}]}
    assert (await client(gateway).responses.input_tokens.count(model="scripted", **asked)).input_tokens == 10
    start = gateway.scripts["thinker"].requests[-1]
    assert start.messages[-1].content[0].media.data == png()
    assert [role for role, _ in prompt(gateway)] == ["user", "assistant", "user"]


async def test_members_of_the_answer_have_no_effect(gateway: Running) -> None:
    members: dict[str, Any] = {"stream": True, "background": True, "store": False, "modalities": ["text", "audio"]}
    response = await gateway.http.post(PATH, json={"input": "hi", "personality": "friendly", **members})
    assert response.json() == {"object": "response.input_tokens", "input_tokens": 10}
    assert gateway.scripts["talker"].requests == []


async def test_a_prompt_that_is_too_long_is_refused_or_made_shorter(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    thinker.error = ContextTooLong("messages", "the prompt has 9 tokens; the limit is 8")
    given = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    status, param, message = await refusal(gateway, "/input_tokens", input=given)
    assert (status, param) == (400, "input")
    assert "9 tokens" in message
    await refusal(gateway, "/input_tokens", input=given, truncation="auto")
    assert [text for _, text in prompt(gateway)] == ["three"]
    thinker.error = QueueFull("full", 1.0)
    assert (await refusal(gateway, "/input_tokens"))[0] == 429


async def test_a_client_that_leaves_ends_the_count(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    thinker.hold = True
    asking = asyncio.create_task(gateway.http.post(PATH, json={"input": "hi"}))
    await thinker.holding.wait()
    asking.cancel()
    await gateway.until(lambda: thinker.ended == ["cancelled"])
