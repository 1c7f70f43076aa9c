"""An agent by LangChain.js: three turns with calls of a tool, whole and streamed, before a model that follows a
script. n8n's chat model is the same class."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.clients.environments import CLIENTS, node_with_packages, report_of
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import running

pytestmark = [pytest.mark.e2e, pytest.mark.weekly]
HALL, ATTIC = {"room": "hall", "on": True}, {"room": "attic", "on": False}
SAID = "".join(PIECES)
# Of each turn: calls, one at a time or several at once, and the text after them.
CALLS = [("lamp", json.dumps(HALL)), None, [("lamp", json.dumps(HALL)), ("lamp", json.dumps(ATTIC))], None, None]
ROLES = ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool", "tool", "assistant", "user"]
WAYS = 4  # chats and Responses, whole and streamed


async def test_three_turns_with_a_tool(tmp_path: Path) -> None:
    node = node_with_packages(tmp_path, CLIENTS / "langchain/package.json")
    async with running() as gateway:
        thinker = gateway.scripts["thinker"]
        thinker.calls = CALLS * WAYS
        command = node, tmp_path / "langchain_agent.mjs", f"{gateway.url}/v1", "scripted"
        report = await asyncio.to_thread(report_of, *command, OPENAI_API_KEY="none")
        asked = list(thinker.requests)
    assert report == [{"calls": [HALL, HALL, ATTIC], "texts": [SAID] * 3}] * WAYS
    assert len(asked) == len(CALLS) * WAYS
    for last in asked[len(CALLS) - 1 :: len(CALLS)]:
        assert [message.role for message in last.messages] == ROLES
        calls = [json.loads(call.arguments_json) for message in last.messages for call in message.tool_calls]
        assert calls == [HALL, HALL, ATTIC]
