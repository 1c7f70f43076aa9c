"""What the Responses API refuses: each refusal names the member at fault, and nothing else is lost."""

from typing import Any

import pytest

from tests.support.clients.responses import create, refusal
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
LAMP = {"type": "function", "name": "lamp", "parameters": {"type": "object"}}
PART = "input[0].content[0]"


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


def said(part: dict[str, Any]) -> dict[str, Any]:
    """A request whose user says one part."""
    return {"input": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "dance"}]}, "input[0].type"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"type": []}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"id": "x"}]}, "input[0].type"),
        (said({"type": {}}), f"{PART}.type"),
        ({"input": [{"role": [], "content": "x"}]}, "input[0].role"),
        ({"tools": [{"type": []}]}, "tools[0]"),
        ({"tool_choice": {"type": []}, "tools": [LAMP]}, "tool_choice.type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (said({"type": "smell"}), f"{PART}.type"),
        (said({"type": "input_image"}), f"{PART}.image_url"),
        (said({"type": "input_image", "file_id": "f"}), f"{PART}.file_id"),
        (said({"type": "input_file", "file_data": "AAAA"}), f"{PART}.file_data"),
        (
            said({"type": "input_file", "file_data": "data:application/pdf;base64,AA"}),
            f"{PART}.file_data",
        ),
        (said({"type": "input_image", "image_url": "data:,x"}), PART),
        ({"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "x"}]}]}, f"{PART}.type"),
        ({"input": [{"type": "function_call_output", "call_id": "c9", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": ["hi", {"type": "function_call_output", "call_id": "c9", "output": 5}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c9", "output": 5}]}, "input[0].output"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c9", "output": [{"type": "input_text"}]}]},
            "input[0].output[0].text",
        ),
        ({"tools": [{"name": "x"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "image_generation"}]}, "tools[0].name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [LAMP]}, "tool_choice.name"),
        ({"tool_choice": {"type": "image_generation"}, "tools": [{"type": "image_generation"}]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": []}]}, "tools": [LAMP]},
            "tool_choice.tools",
        ),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"conversation": "conv_0"}, "conversation"),
        ({"conversation": "conv_0", "previous_response_id": "resp_0"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "nobody"}}, "audio.voice"),
        ({"modelo": "x"}, "modelo"),
    ],
)
async def test_bad_input_is_named_and_the_rest_goes_on(gateway: Running, members: dict, param: str) -> None:
    status, named, message = await refusal(gateway, **members)
    assert (status, named) == (404 if param in ("conversation", "input[0].id") and "deleted" in message else 400, param)
    assert message.startswith(param)
    if not members.keys() & {"background"}:  # which a count has no use for
        assert await refusal(gateway, "/input_tokens", **members) == (status, named, message)
    assert (await create(gateway)).status == "completed"


async def test_a_text_with_too_many_escapes_is_named(gateway: Running) -> None:
    file = {"type": "input_file", "file_data": "data:text/plain," + "%" * 2_000_001}
    status, named, message = await refusal(gateway, **said(file))
    assert (status, named) == (400, f"{PART}.file_data")
    assert "send it in base64" in message
