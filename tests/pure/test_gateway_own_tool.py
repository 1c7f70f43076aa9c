"""A tool of one's own: one class and one entry of the registry, for chats, Responses and realtime sessions."""

import json
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import Mock

import pytest

import gateway.__main__ as gateway_program
from gateway.answers.gateway import Gateway
from gateway.answers.tools.calls import HostedCall, HostedTool
from gateway.answers.tools.events import ToolEvent, ToolResult
from gateway.answers.tools.registry import TOOLS
from gateway.errors import invalid
from gateway.validation import Strict
from quartet.v1 import thinker_pb2
from tests.support.clients.realtime_client import kinds, session
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "".join(PIECES)
USER = {"role": "user", "content": "How warm is it in Rome?"}
CALL, UNKNOWN = ("weather", '{"city": "Rome"}'), ("weather", '{"city": "Atlantis"}')
FORECAST = "Rome: 21 celsius"
UNREADABLE = ("weather", "{city: Rome}")  # no JSON
FAILURE = "There is no forecast: city: 'Atlantis' is not known"
UNREAD = ("assistant", ("weather", {})), ("tool", "There is no forecast: city: None is not known")


class WeatherSettings(Strict):
    type: Literal["weather"]
    unit: Literal["celsius", "kelvin"] = "celsius"


@dataclass(frozen=True)
class Weather(HostedTool):
    settings: WeatherSettings
    name = "weather"
    description = "The weather of a city, now."
    schema = WeatherSettings
    failed = "There is no forecast: "

    def parameters(self) -> dict[str, Any]:
        return {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

    async def events(self, gateway: Gateway, call: HostedCall) -> AsyncGenerator[ToolEvent, None]:
        city = call.read().get("city")
        if city != "Rome":
            raise invalid("city", f"{city!r} is not known")
        yield ToolResult({"output": f"{city}: 21 {self.settings.unit}"})


@pytest.fixture
def gateway(speech_gateway: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setitem(TOOLS, "weather", Weather)
    monkeypatch.setattr(speech_gateway.app.state.gateway.settings, "hosted_tools", ["weather"])
    return speech_gateway


def read_by_model(start: thinker_pb2.GenerateStart) -> list[tuple[Any, ...]]:
    """The conversation: calls with their arguments, results with their texts."""
    read = list[tuple[Any, ...]]()
    for message in start.messages:
        calls = [(call.name, json.loads(call.arguments_json)) for call in message.tool_calls]
        read.append((message.role, *calls, *(part.text for part in message.content)))
    return read


CALLED = ("assistant", ("weather", {"city": "Rome"}))
READ = [("user", USER["content"]), CALLED, ("tool", FORECAST)]


async def test_a_chat_calls_it_and_shows_the_words_alone(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    thinker.calls = [CALL]
    tools = {"tools": [{"type": "weather"}], "tool_choice": {"type": "weather"}}
    body = (await gateway.chat({"model": "scripted", "messages": [USER]} | tools)).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None, "reasoning": None}
    first, second = thinker.requests
    assert [(tool.name, json.loads(tool.parameters_json)["required"]) for tool in first.tools] == [
        ("weather", ["city"])
    ]
    assert (first.tool_choice.name, second.HasField("tool_choice")) == ("weather", False)
    assert read_by_model(second) == READ
    assert second.messages[1].tool_calls[0].id == second.messages[2].tool_call_id

    thinker.calls = [UNKNOWN]
    events = await gateway.events({"model": "scripted", "messages": [USER]} | tools)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    assert {name for delta in deltas for name in delta} == {"role", "content"}
    assert read_by_model(thinker.requests[-1])[-1] == ("tool", FAILURE)

    thinker.calls = [UNREADABLE]
    assert (await gateway.chat({"model": "scripted", "messages": [USER]} | tools)).status_code == 200
    assert read_by_model(thinker.requests[-1])[-2:] == [*UNREAD]


async def test_a_response_has_it_as_an_item_that_the_next_turn_reads(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    thinker.calls = [[CALL, UNKNOWN]]
    body = {"model": "scripted", "input": [USER], "tools": [{"type": "weather"}], "store": False}
    made = (await gateway.http.post("/v1/responses", json=body)).json()
    call, failed, message = made["output"]
    head = {"id": call["id"], "type": "weather_call", "status": "completed"}
    assert call == head | {"arguments": CALL[1], "output": FORECAST}
    assert (failed["status"], failed["arguments"], failed["error"]["code"]) == ("failed", UNKNOWN[1], "invalid_value")
    assert message["content"][0]["text"] == TEXT
    both = [*READ, ("assistant", ("weather", {"city": "Atlantis"})), ("tool", FAILURE)]
    assert read_by_model(thinker.requests[1]) == both

    again = body | {"input": [USER, *made["output"], {"role": "user", "content": "And now?"}]}
    assert (await gateway.http.post("/v1/responses", json=again)).status_code == 200
    assert read_by_model(thinker.requests[2])[: len(both)] == both

    thinker.calls = [UNREADABLE]
    (call, _) = (await gateway.http.post("/v1/responses", json=body)).json()["output"]
    assert (call["status"], call["arguments"]) == ("failed", "{}")
    assert read_by_model(thinker.requests[-1])[-2:] == [*UNREAD]
    again = body | {"input": [USER, call | {"arguments": "nonsense"}, {"role": "user", "content": "And now?"}]}
    assert (await gateway.http.post("/v1/responses", json=again)).status_code == 200
    assert read_by_model(thinker.requests[-1])[1] == UNREAD[0]


async def test_a_session_has_it_as_an_item(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    thinker.calls = [CALL]
    async with session(gateway) as client:
        await client.ask(
            "session.update", "session.updated", session={"tools": [{"type": "weather", "unit": "kelvin"}]}
        )
        await client.say(USER["content"])
        events = await client.respond(output_modalities=["text"], tool_choice={"type": "weather"})
        told = [kind for kind in kinds(events) if "weather_call" in kind]
        assert told == ["response.weather_call.in_progress", "response.weather_call.completed"]
        call, message = events[-1]["response"]["output"]
        assert (call["type"], call["status"]) == ("weather_call", "completed")
        assert (call["arguments"], call["output"]) == (CALL[1], "Rome: 21 kelvin")
        assert message["content"][0]["text"] == TEXT
        assert thinker.requests[0].tool_choice.name == "weather"
        read = [*READ[:2], ("tool", "Rome: 21 kelvin")]
        assert read_by_model(thinker.requests[1]) == read

        thinker.calls = [UNKNOWN]
        await client.say("And in Atlantis?")
        events = await client.respond(output_modalities=["text"])
        assert read_by_model(thinker.requests[2])[:3] == read
        assert read_by_model(thinker.requests[3])[-1] == ("tool", FAILURE)
        assert events[-1]["response"]["output"][0]["status"] == "incomplete"


async def test_its_settings_are_checked(gateway: Running) -> None:
    tools = [{"type": "weather", "unit": "miles"}]
    status, error = await gateway.refusal({"model": "scripted", "messages": [USER], "tools": tools})
    assert (status, error["param"]) == (400, "tools[0].unit")
    refused = await gateway.http.post("/v1/responses", json={"model": "scripted", "input": "hi", "tools": tools})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].unit")
    async with session(gateway) as client:
        error = await client.refusal("session.update", session={"tools": tools})
        assert error["param"] == "session.tools[0].unit"


async def test_a_setting_that_names_no_tool_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("logs", "tracing", "create_app", "video_store"):  # what the rest of a start would change here
        monkeypatch.setattr(gateway_program, other, Mock())
    monkeypatch.setattr(sys, "argv", ["gateway", "--pipeline", "dit", "--hosted-tools", "image_generation,wether"])
    with pytest.raises(SystemExit, match="there is no tool 'wether'; use image_generation, "):
        gateway_program.main()
