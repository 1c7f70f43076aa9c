"""image_generation in a chat: the thinker asks for pictures, the dit makes them; both follow a script."""

import asyncio
import base64
import json
from typing import Any

import pytest

from quartet.v1 import thinker_pb2
from services.common.errors import InternalError
from tests.support.scripted.code2wav import PCM16
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import SPEECH, Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PIPELINE = SPEECH.with_name("qwen3-omni-dit.yaml")
TEXT = "".join(PIECES)
TOOL = {"type": "image_generation"}
LAMP = {"type": "function", "function": {"name": "lamp", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "draw a cat"}
ASK: dict[str, Any] = {"model": "scripted", "messages": [USER], "tools": [TOOL]}
DRAW = ("image_generation", '{"prompt": "a cat", "action": "generate"}')
CHANGE = ("image_generation", '{"prompt": "a blue cat", "action": "edit"}')


async def answered(gateway: Running, body: dict[str, Any]) -> dict[str, Any]:
    response = await gateway.chat(body)
    assert response.status_code == 200, response.text
    return response.json()


def file_of(image: dict[str, Any]) -> bytes:
    return base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))


def called_with(start: thinker_pb2.GenerateStart) -> str:
    """The prompt of the first call in a conversation."""
    call = next(message for message in start.messages if message.role == "assistant").tool_calls[0]
    return json.loads(call.arguments_json)["prompt"]


async def test_a_picture_is_made_and_changed_in_the_next_turn(painter: Running) -> None:
    thinker, dit = painter.scripts["thinker"], painter.scripts["dit"]
    thinker.calls = [DRAW]
    body = await answered(painter, ASK | {"tools": [TOOL | {"size": "64x48"}]})
    choice = body["choices"][0]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == (TEXT, "stop")
    assert "tool_calls" not in message
    (image,) = message["images"]
    assert file_of(image).startswith(b"\x89PNG")
    assert (dit.requests[0].prompt, dit.requests[0].width, len(dit.requests[0].images)) == ("a cat", 64, 0)
    first, second = thinker.requests
    assert [tool.name for tool in first.tools] == ["image_generation"]
    assert [message.role for message in second.messages] == ["user", "assistant", "tool"]
    assert second.messages[2].content[1].media.data == file_of(image)
    usage = body["usage"]  # both turns
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (20, 6, 26)
    details = {"cached_tokens": 4, "audio_tokens": 6, "image_tokens": 8, "text_tokens": 6}
    assert usage["prompt_tokens_details"] == details

    thinker.calls = [CHANGE]
    messages = [USER, message, {"role": "user", "content": "make it blue"}]
    edited = await answered(painter, ASK | {"messages": messages})
    roles = [message.role for message in thinker.requests[2].messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    assert thinker.requests[2].messages[2].content[1].media.data == file_of(image)
    assert called_with(thinker.requests[2]) == "a cat"
    assert (dit.requests[1].prompt, len(dit.requests[1].images)) == ("a blue cat", 1)
    assert bytes(dit.media) == file_of(image) or dit.requests[1].images[0].data == file_of(image)
    assert len(edited["choices"][0]["message"]["images"]) == 1

    thinker.calls = [CHANGE]  # as parts of the content, too; the picture that the user sent last goes before it
    said = {"role": "assistant", "content": [{"type": "text", "text": TEXT}, image]}
    said["content"][1] = {"type": "image_url", "image_url": image["image_url"]}
    await answered(painter, ASK | {"messages": [USER, said, {"role": "user", "content": "blue"}]})
    assert len(dit.requests[2].images) == 1
    assert called_with(thinker.requests[4]) == "draw a cat"  # what the model wrote is not told


async def test_a_stream_has_previews_the_picture_and_the_text(painter: Running) -> None:
    painter.scripts["thinker"].calls = [DRAW]
    options = {"include_usage": True}
    events = await painter.events(ASK | {"tools": [TOOL | {"partial_images": 2}], "stream_options": options})
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    previews = [delta["partial_images"][0] for delta in deltas if "partial_images" in delta]
    assert [preview["partial_image_index"] for preview in previews] == [0, 1]
    (images,) = [delta["images"] for delta in deltas if "images" in delta]
    assert file_of(images[0]).startswith(b"\x89PNG")
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    assert [delta.get("role") for delta in deltas].count("assistant") == 1
    assert not [delta for delta in deltas if "tool_calls" in delta]
    assert events[-1]["usage"]["total_tokens"] == 26
    reasons = [event["choices"][0]["finish_reason"] for event in events if event["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"]


async def test_an_answer_with_a_picture_is_spoken(painter: Running) -> None:
    painter.scripts["thinker"].calls = [DRAW]
    body = await answered(painter, ASK | {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}})
    message = body["choices"][0]["message"]
    assert message["images"]
    assert base64.b64decode(message["audio"]["data"]).endswith(PCM16)
    assert body["usage"]["completion_tokens_details"]["audio_tokens"] == 6


async def test_a_picture_that_cannot_be_made_is_told_and_the_answer_goes_on(painter: Running) -> None:
    thinker, dit = painter.scripts["thinker"], painter.scripts["dit"]
    thinker.calls = [CHANGE, ("image_generation", "nonsense")]
    message = (await answered(painter, ASK | {"tools": [TOOL | {"action": "edit"}]}))["choices"][0]["message"]
    assert [error["param"] for error in message["image_errors"]] == ["action", "prompt"]
    assert (message["content"], "images" in message) == (TEXT, False)
    told = thinker.requests[1].messages[-1].content[0].text
    assert told.startswith("The picture could not be made: action")
    dit.error = InternalError("oh")
    thinker.calls = [DRAW]
    deltas = [event["choices"][0]["delta"] for event in await painter.events(ASK)]
    (errors,) = [delta["image_errors"] for delta in deltas if "image_errors" in delta]
    assert errors[0]["type"] == "server_error"
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT


async def test_functions_of_the_client_beside_it_are_called(painter: Running) -> None:
    thinker = painter.scripts["thinker"]
    thinker.calls = [DRAW, ("lamp", '{"on": true}')]
    body = await answered(painter, ASK | {"tools": [LAMP, TOOL], "tool_choice": TOOL})
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("lamp", '{"on": true}')
    assert len(choice["message"]["images"]) == 1
    first, second = thinker.requests
    assert (first.tool_choice.name, second.HasField("tool_choice")) == ("image_generation", False)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "on"}
    done = await answered(painter, ASK | {"tools": [LAMP, TOOL], "messages": [USER, choice["message"], result]})
    assert done["choices"][0]["message"]["content"] == TEXT
    roles = [message.role for message in thinker.requests[2].messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]


async def test_calls_without_end_are_ended(painter: Running) -> None:
    painter.scripts["thinker"].calls = [DRAW] * 20
    body = await answered(painter, ASK)
    message = body["choices"][0]["message"]
    assert (len(message["images"]), len(message["image_errors"])) == (8, 1)
    assert body["choices"][0]["finish_reason"] == "stop"
    assert [tool.name for tool in painter.scripts["thinker"].requests[-1].tools] == []


async def test_a_client_that_leaves_ends_the_painting(painter: Running) -> None:
    thinker, dit = painter.scripts["thinker"], painter.scripts["dit"]
    thinker.calls = [DRAW]
    dit.hold, dit.after = True, 1
    asking = asyncio.create_task(painter.chat(ASK))
    await dit.holding.wait()
    asking.cancel()
    await painter.until(lambda: dit.ended == ["cancelled"])
    await asyncio.gather(asking, return_exceptions=True)


ANSWER = {"role": "assistant", "content": "here"}
REFUSED = [
    ({"tools": [LAMP, TOOL | {"size": "63x48"}]}, "tools[1].size"),
    ({"tools": [TOOL | {"output_format": "bmp"}]}, "tools[0].output_format"),
    ({"tools": [TOOL | {"partial_images": 4}]}, "tools[0].partial_images"),
    ({"tools": [TOOL | {"action": "dance"}]}, "tools[0].action"),
    ({"tools": [TOOL, TOOL]}, "tools[1]"),
    ({"tools": [TOOL, LAMP | {"function": {"name": "image_generation"}}]}, "tools[1].function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [LAMP], "tool_choice": TOOL}, "tool_choice.type"),
    ({"n": 2}, "n"),
    ({"messages": [USER, ANSWER | {"images": "x"}, USER]}, "messages[1].images"),
    (
        {"messages": [USER, {"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "a"}]}]},
        "messages[1].content[0].image_url",
    ),
    ({"messages": [USER, ANSWER | {"images": [{}]}, USER]}, "messages[1].images[0].image_url.url"),
    # counted in the client's messages, though the thinker gets more of them
    (
        {
            "messages": [
                ANSWER | {"images": [{"image_url": {"url": "data:image/png;base64,AA"}}]},
                {"role": "user", "content": "hi"},
            ]
        },
        "messages[0].content[1]",
    ),
]


@pytest.mark.parametrize(("members", "param"), REFUSED)
async def test_what_is_wrong_is_named(painter: Running, members: dict[str, Any], param: str) -> None:
    status, error = await painter.refusal(ASK | members)
    assert (status, error["param"]) == (400, param), error
    assert error["message"].startswith(param)


async def test_without_the_setting_it_is_refused_with_the_fix() -> None:
    async with running(PIPELINE) as gateway:
        status, error = await gateway.refusal(ASK)
        assert (status, error["param"]) == (400, "tools[0].type")
        assert "--hosted-tools image_generation" in error["message"]
        sent_back = [USER, {"role": "assistant", "content": "here", "images": "anything"}, USER]
        assert (await gateway.chat({"model": "scripted", "messages": sent_back})).status_code == 200


async def test_a_server_without_a_dit_refuses_it() -> None:
    async with running(SPEECH, hosted_tools=["image_generation"]) as gateway:
        status, error = await gateway.refusal(ASK)
        assert (status, error["param"]) == (400, "tools[0].type")
        assert "makes no images" in error["message"]
