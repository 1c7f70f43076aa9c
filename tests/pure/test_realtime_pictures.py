"""image_generation in realtime sessions: the thinker asks for a picture, the dit makes it; both follow a script."""

import asyncio
import base64
import json
from typing import Any

import pytest

from services.common.errors import InternalError
from tests.support.clients.realtime_client import kinds, session, sound_of
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import SPEECH, Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PIPELINE = SPEECH.with_name("qwen3-omni-dit.yaml")
TEXT = "".join(PIECES)
TOOL = {"type": "image_generation"}
LAMP = {"type": "function", "name": "lamp", "parameters": {"type": "object"}}
DRAW = ("image_generation", '{"prompt": "a cat", "action": "generate"}')
CHANGE = ("image_generation", '{"prompt": "a blue cat", "action": "edit"}')


def made(events: list[dict[str, Any]]) -> bytes:
    (told,) = [event for event in events if event["type"] == "response.image_generation_call.completed"]
    return base64.b64decode(told["result"])


async def test_a_picture_is_made_spoken_of_and_changed_in_the_next_turn(painter: Running) -> None:
    thinker, dit = painter.scripts["thinker"], painter.scripts["dit"]
    thinker.calls = [DRAW]
    async with session(painter) as client:
        tool = TOOL | {"size": "64x48", "partial_images": 1}
        await client.ask("session.update", "session.updated", session={"tools": [tool], "tool_choice": TOOL})
        await client.say("draw a cat")
        events = await client.respond()
        file = made(events)
        assert file.startswith(b"\x89PNG")
        told = [kind for kind in kinds(events) if "image_generation_call" in kind]
        steps = ("in_progress", "generating", "partial_image", "completed")
        assert told == [f"response.image_generation_call.{step}" for step in steps]
        done = events[-1]["response"]
        *_, picture, message = done["output"]  # the scripted talker says nothing aloud first
        assert (done["status"], picture["type"], picture["size"]) == ("completed", "image_generation_call", "64x48")
        assert "result" not in picture  # it was told once
        assert message["content"][0]["transcript"] == TEXT
        assert sound_of(events)
        assert done["usage"]["input_tokens"] == 20
        first, second = thinker.requests
        assert first.tool_choice.name == "image_generation"
        assert not second.HasField("tool_choice")
        assert [message.role for message in second.messages] == ["user", "assistant", "tool"]
        assert second.messages[2].content[1].media.data == file

        thinker.calls = [CHANGE]
        await client.say("make it blue")
        await client.respond(output_modalities=["text"], tool_choice="auto")
    roles = [message.role for message in thinker.requests[2].messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    call = thinker.requests[2].messages[1].tool_calls[0]
    assert json.loads(call.arguments_json) == {"prompt": "a cat"}
    assert [len(request.images) for request in dit.requests] == [0, 1]
    assert bytes(dit.media) == file or dit.requests[1].images[0].data == file


async def test_a_picture_that_cannot_be_made_is_told_and_the_answer_goes_on(painter: Running) -> None:
    thinker, dit = painter.scripts["thinker"], painter.scripts["dit"]
    thinker.calls, dit.error = [DRAW], InternalError("oh")
    async with session(painter) as client:
        await client.say("draw a cat")
        events = await client.respond(tools=[TOOL], output_modalities=["text"])
    picture, message = events[-1]["response"]["output"]
    assert (picture["status"], picture["error"]["type"]) == ("incomplete", "server_error")
    assert message["content"][0]["text"] == TEXT
    assert thinker.requests[1].messages[-1].content[0].text.startswith("The picture could not be made: ")


async def test_all_turns_share_the_time_of_a_request() -> None:
    """Each turn alone is within the time; both are not."""
    async with running(PIPELINE, hosted_tools=["image_generation"], request_timeout_s=1.0) as gateway:
        gateway.scripts["thinker"].takes_s = lambda: 0.7
        gateway.scripts["thinker"].calls = [DRAW]
        async with session(gateway) as client:
            await client.ask("session.update", "session.updated", session={"tools": [TOOL]})
            await client.say("draw a cat")
            events = await client.respond()
    done = events[-1]["response"]
    assert (done["status"], done["status_details"]["error"]["code"]) == ("failed", "deadline_exceeded")


async def test_a_function_of_the_client_ends_the_answer(painter: Running) -> None:
    painter.scripts["thinker"].calls = [DRAW, ("lamp", '{"on": true}')]
    async with session(painter) as client:
        await client.say("draw a cat")
        events = await client.respond(tools=[LAMP, TOOL], output_modalities=["text"])
    kinds_made = [item["type"] for item in events[-1]["response"]["output"]]
    assert kinds_made == ["image_generation_call", "function_call"]


async def test_a_cancelled_answer_ends_the_painting(painter: Running) -> None:
    thinker, dit = painter.scripts["thinker"], painter.scripts["dit"]
    thinker.calls, dit.hold, dit.after = [DRAW], True, 1
    async with session(painter) as client:
        await client.say("draw a cat")
        await client.send("response.create", response={"tools": [TOOL], "output_modalities": ["text"]})
        await client.until("response.image_generation_call.generating")
        async with asyncio.timeout(60):
            await dit.holding.wait()
        await client.send("response.cancel")
        done = (await client.until("response.done"))[-1]["response"]
        assert (done["status"], done["output"][0]["status"]) == ("cancelled", "incomplete")
        await painter.until(lambda: dit.ended == ["cancelled"])
        await client.say("never mind")
        events = await client.respond(output_modalities=["text"])
        assert events[-1]["response"]["status"] == "completed"
    assert "it was cancelled" in thinker.requests[-1].messages[2].content[0].text


REFUSED = [
    ([LAMP, TOOL | {"size": "63x48"}], "tools[1].size"),
    ([TOOL | {"action": "dance"}], "tools[0].action"),
    ([TOOL | {"partial_images": 4}], "tools[0].partial_images"),
    ([TOOL, TOOL], "tools[1]"),
    ([TOOL, LAMP | {"name": "image_generation"}], "tools[1].name"),
]


@pytest.mark.parametrize(("tools", "param"), REFUSED)
async def test_what_is_wrong_is_named(painter: Running, tools: list[Any], param: str) -> None:
    async with session(painter) as client:
        error = await client.refusal("session.update", session={"tools": tools})
        assert error["param"] == f"session.{param}"
        error = await client.refusal("response.create", response={"tools": tools})
        assert error["param"] == f"response.{param}"


async def test_without_the_setting_the_tool_is_kept_and_not_used() -> None:
    async with running(PIPELINE) as gateway, session(gateway) as client:
        await client.say("draw a cat")
        await client.respond(tools=[TOOL], tool_choice=TOOL, output_modalities=["text"])
        assert not gateway.scripts["thinker"].requests[0].tools
