"""The tool image_generation: a pipeline's thinker asks for pictures, and its dit makes them; both follow a script."""

import base64
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.common.errors import InternalError
from tests.support.clients.responses import client, create, kinds, refusal, stream
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import SPEECH, Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "".join(PIECES)
LAMP = {"type": "function", "name": "lamp", "parameters": {"type": "object"}}
TOOL = {"type": "image_generation"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_painter() -> AsyncIterator[Running]:
    async with running(SPEECH.with_name("qwen3-omni-dit.yaml")) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def painter(module_painter: Running) -> AsyncIterator[Running]:
    """Before stages that speak and one that makes pictures."""
    yield module_painter
    await module_painter.reset()


async def test_a_picture_is_made_told_and_changed_in_the_next_turn(painter: Running) -> None:
    thinker, dit = painter.scripts["thinker"], painter.scripts["dit"]
    thinker.calls = [("image_generation", '{"prompt": "a cat", "action": "generate"}')]
    tool = {"type": "image_generation", "partial_images": 2, "size": "64x48"}
    events = await stream(painter, "draw a cat", tools=[tool])
    image = [f"image_generation_call.{what}" for what in ("in_progress", "generating", "partial_image", "completed")]
    told = kinds(events)
    assert told[:8] == ["created", "in_progress", "output_item.added", *image, "output_item.done"]
    picture, message = events[-1]["response"]["output"]
    assert (picture["type"], picture["status"], picture["size"]) == ("image_generation_call", "completed", "64x48")
    assert base64.b64decode(picture["result"]).startswith(b"\x89PNG")
    assert message["content"][0]["text"] == TEXT
    partial = [event for event in events if event["type"].endswith("partial_image")]
    assert [event["partial_image_index"] for event in partial] == [0, 1]
    first, second = thinker.requests
    assert [tool.name for tool in first.tools] == ["image_generation"]
    assert [message.role for message in second.messages] == ["user", "assistant", "tool"]
    assert second.messages[2].content[1].media.data == base64.b64decode(picture["result"])
    assert (dit.requests[0].prompt, len(dit.requests[0].images)) == ("a cat", 0)

    thinker.calls = [("image_generation", '{"prompt": "a blue cat", "action": "edit"}')]
    response_id = events[-1]["response"]["id"]
    asked = {"tools": [TOOL], "previous_response_id": response_id}
    edited = await create(painter, "make it blue", **asked, extra_body={"enable_response_messages": True})
    assert [item.type for item in edited.output] == ["image_generation_call", "message"]
    assert edited.output[0].action == "edit"
    call = thinker.requests[2].messages[1].tool_calls[0]  # as the model wrote it, also in the next turn
    assert json.loads(call.arguments_json) == {"prompt": picture["revised_prompt"]} == {"prompt": "a cat"}
    assert (dit.requests[1].prompt, len(dit.requests[1].images)) == ("a blue cat", 1)
    assert bytes(dit.media) == base64.b64decode(picture["result"]) or dit.requests[1].images[0].data
    prompts = [edited.model_extra["input_messages"][0]["message"], edited.model_extra["output_messages"][1]["message"]]
    assert prompts[1].startswith(prompts[0])  # of the first turn, and of the next
    assert [each["tokens"] for each in edited.model_extra["output_messages"][::2]] == [[0, 1, 2]] * 2


async def test_a_picture_that_cannot_be_made_is_told_and_the_answer_goes_on(painter: Running) -> None:
    thinker, dit = painter.scripts["thinker"], painter.scripts["dit"]
    thinker.calls = [("image_generation", '{"prompt": "x"}'), ("image_generation", "nonsense")]
    response = await create(painter, tools=[TOOL | {"action": "edit"}])
    assert [item.status for item in response.output] == ["failed", "failed", "completed"]
    assert [
        item.error["message"] if isinstance(item.error, dict) else item.error.message for item in response.output[:2]
    ]
    assert response.output_text == TEXT
    dit.error = InternalError("oh")
    thinker.calls = [("image_generation", '{"prompt": "x", "action": "generate"}')]
    response = await create(painter, tools=[TOOL])
    assert [item.status for item in response.output] == ["failed", "completed"]


async def test_settings_of_pictures_are_checked_at_once(painter: Running) -> None:
    for member, value in (("size", "63x48"), ("output_format", "bmp"), ("partial_images", 4), ("action", "dance")):
        status, param, _ = await refusal(painter, tools=[LAMP, {"type": "image_generation", member: value}])
        assert (status, param) == (400, f"tools[1].{member}")
    status, param, _ = await refusal(painter, tools=[TOOL] * 2)
    assert (status, param) == (400, "tools[1]")


async def test_the_most_calls_of_tools_end_them(painter: Running) -> None:
    thinker = painter.scripts["thinker"]
    thinker.calls = [("image_generation", '{"prompt": "x", "action": "generate"}')] * 2
    response = await create(painter, tools=[LAMP, TOOL], max_tool_calls=2)
    assert [item.type for item in response.output] == ["image_generation_call"] * 2 + ["message"]
    assert [[tool.name for tool in start.tools] for start in thinker.requests][-1] == ["lamp"]


async def test_calls_of_one_turn_count_towards_the_most(painter: Running) -> None:
    thinker, dit = painter.scripts["thinker"], painter.scripts["dit"]
    thinker.calls = [[("image_generation", '{"prompt": "a"}'), ("image_generation", '{"prompt": "b"}')]]
    response = await create(painter, tools=[TOOL], max_tool_calls=1)
    assert [(item.type, item.status) for item in response.output[:2]] == [
        ("image_generation_call", "completed"),
        ("image_generation_call", "failed"),
    ]
    assert [request.prompt for request in dit.requests] == ["a"]
    assert response.output[2].content[0].text == TEXT
    first, second = [part.content[0].text for part in thinker.requests[1].messages if part.role == "tool"]
    assert "was made" in first
    assert "1 calls of tools that run here are the most of a request" in second


async def test_cancelling_while_a_picture_is_made_ends_that(painter: Running) -> None:
    thinker, dit = painter.scripts["thinker"], painter.scripts["dit"]
    thinker.calls = [("image_generation", '{"prompt": "x", "action": "generate"}')]
    dit.hold, dit.after = True, 1
    made = await create(painter, tools=[TOOL], background=True)
    await dit.holding.wait()
    assert (await client(painter).responses.cancel(made.id)).status == "cancelled"
    await painter.until(lambda: dit.ended == ["cancelled"])
