"""Finding tool calls in an answer, however it is cut into pieces."""

import json

import pytest

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput
from services.thinker.config import ThinkerSettings
from services.thinker.family import ToolCallMarkers
from services.thinker.request import read_conversation
from services.thinker.structure import ToolChoice, forced_schema
from services.thinker.tools import ToolCallParser

MARKERS = ToolCallMarkers("<tool_call>", "</tool_call>")
ANSWER = (
    'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "S\\u00e3o {Paulo}", "days": [1, {"n": 2}]}}\n'
    '</tool_call>\n<tool_call>{"name":"time","arguments":{}}</tool_call> Done < 3.'
)
BAD_NAME = r'<tool_call>{"name": "\q", "arguments": {}}</tool_call>'
UNDECLARED = '<tool_call>{"name": "delete_all", "arguments": {"sure": true}}</tool_call> and on'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}]


def parse(answer: str, piece: int, forced: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """The text, and name and arguments of each call, of an answer that arrives `piece` characters at a time."""
    parser = ToolCallParser(MARKERS, {"weather", "time"}, forced)
    text, names, arguments = "", {}, {}
    for at in range(0, len(answer), piece):
        parsed = parser.feed(answer[at : at + piece], is_last=at + piece >= len(answer))
        text += parsed.text
        for call in parsed.tool_calls:
            if call.name:
                assert call.id
                names[call.index] = call.name
            arguments[call.index] = arguments.get(call.index, "") + call.arguments_json
    return text, [(names[i], arguments[i]) for i in sorted(names)]


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_calls_are_separated_from_text(piece: int) -> None:
    text, calls = parse(ANSWER, piece)
    assert text == "Let me see.\n Done < 3."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("weather", {"city": "São {Paulo}", "days": [1, {"n": 2}]}),
        ("time", {}),
    ]


@pytest.mark.parametrize("piece", [1, 5, 1000])
@pytest.mark.parametrize(
    "answer", ["a < b, <tool", "<tool_call>nonsense</tool_call> and on", "<tool_call>cut", BAD_NAME, UNDECLARED]
)
def test_what_is_no_call_stays_text(answer: str, piece: int) -> None:
    assert parse(answer, piece) == (answer, [])


@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_a_forced_answer_is_one_call(piece: int) -> None:
    assert parse('{"name":"weather","arguments":{"city":"Rome"}}', piece, forced=True) == (
        "",
        [("weather", '{"city":"Rome"}')],
    )


def test_choices_force_schemas() -> None:
    assert forced_schema(ToolChoice.MODE_AUTO, "", TOOLS) is None
    schema = json.loads(forced_schema(ToolChoice.MODE_FUNCTION, "weather", TOOLS) or "")
    assert [call["properties"]["name"] for call in schema["anyOf"]] == [{"const": "weather"}]
    assert "weather" in (forced_schema(ToolChoice.MODE_REQUIRED, "", TOOLS) or "")


@pytest.mark.parametrize(("mode", "name"), [(ToolChoice.MODE_FUNCTION, "other"), (ToolChoice.MODE_REQUIRED, "")])
def test_a_choice_of_what_is_not_there_is_refused(mode: ToolChoice.Mode, name: str) -> None:
    with pytest.raises(InvalidInput, match="tool_choice"):
        forced_schema(mode, name, TOOLS if name else [])


def read_back(arguments: str) -> object:
    """The arguments of an earlier call, as the chat template takes them."""
    start = thinker_pb2.GenerateStart()
    start.messages.add(role="assistant").tool_calls.add(id="c", name="weather", arguments_json=arguments)
    (message,) = read_conversation(start, [], ThinkerSettings(model="m")).messages
    return message.tool_calls[0]["function"]["arguments"]


def test_arguments_of_earlier_calls_may_be_none_or_cut_off() -> None:
    assert [read_back(text) for text in ("", "{}", "[]", " [ ]", "null")] == [{}] * 5
    assert read_back('{"city": "Rome"}') == {"city": "Rome"}
    assert read_back('{"city": "Ro') == '{"city": "Ro'
    for other in ("5", '"Rome"', '["Rome"]', "true", "0"):
        with pytest.raises(InvalidInput, match=r"messages\[0\]\.tool_calls\[0\]\.arguments_json"):
            read_back(other)
