"""What is refused of a request in Anthropic's form, and by which name; and that nothing odd is an error of ours."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.dialects.anthropic.conversation import Conversation
from gateway.dialects.anthropic.schema import CountRequest
from gateway.errors import ApiError
from gateway.validation import validated_json
from tests.pure.test_message_requests import ANSWERED, ASK, CALL, IMAGE, LAMP, NOTES, TEXT, parsed, read, result, user

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown member": ({"temprature": 1}, "temprature: unknown parameter"),
    "no messages": ({"messages": []}, "messages: List should have at least 1 item"),
    "no limit": ({"max_tokens": None}, "max_tokens: required, but missing"),
    "a limit of 0": ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    "another role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: must be one of 'system', "),
    "another block": (user({"type": "video"}), "messages[0].content[0].type: must be one of 'text', 'image', "),
    "an unknown member of a block": (user(TEXT | {"txet": ""}), "messages[0].content[0].txet: unknown parameter"),
    "a block of the other role": (user(CALL), "messages[0].content[0].type: must be one of "),
    "an empty message": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: List should have"),
    "an answer that was begun": (
        {"messages": [ANSWERED, {"role": "assistant", "content": "Well, "}]},
        "messages[1]: the last message must be the user's",
    ),
    "a PDF": (
        user(TEXT, {"type": "document", "source": IMAGE["source"]}),
        "messages[0].content[1].source: documents are read as text; send the text",
    ),
    "a document by its URL": (
        user({"type": "document", "source": {"type": "url", "url": "https://a.example/b.pdf"}}),
        "messages[0].content[0].source: documents are read as text",
    ),
    "a file": (
        user({"type": "image", "source": {"type": "file", "file_id": "file_1"}}),
        "messages[0].content[0].source.file_id: there are no uploaded files here; send",
    ),
    "a file as document": (
        user({"type": "document", "source": {"type": "file", "file_id": "file_1"}}),
        "messages[0].content[0].source.file_id: there are no uploaded files here",
    ),
    "citations": (
        user({"type": "document", "source": NOTES, "citations": {"enabled": True}}),
        "messages[0].content[0].citations: answers here cite nothing; leave citations out",
    ),
    "a result of no call": (
        {"messages": [{"role": "user", "content": result()["messages"][2]["content"]}]},
        "messages[0].content[0].tool_use_id: no tool_use 'toolu_1' comes before it; send the assistant's",
    ),
    "a tool in another form": (
        {"tools": [{"type": "function", "function": {"name": "lamp"}}]},
        "tools[0].type: must be custom, or left out: a tool has a name and an input_schema",
    ),
    "a tool without a schema": ({"tools": [{"name": "lamp"}]}, "tools[0].input_schema: required, but missing"),
    "a call of no tool": ({"tool_choice": {"type": "any"}}, "tool_choice: there is no tool to call"),
    "a call of another tool": (
        {"tools": [LAMP], "tool_choice": {"type": "tool", "name": "bell"}},
        "tool_choice.name: 'bell' is not one of the tools",
    ),
    "a choice without a name": ({"tools": [LAMP], "tool_choice": {"type": "tool"}}, "tool_choice: must have a name"),
    "other servers' tools": ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: this server calls no others"),
    "too many stops": ({"stop_sequences": list("abcdefghijklmnopq")}, "stop_sequences: List should have at most 16"),
    "an unknown thought": ({"thinking": {"type": "deep"}}, "thinking.type: Input should be 'enabled', 'adaptive'"),
}


def refusal(changes: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as caught:
        read(changes)
    assert caught.value.status == 400
    assert caught.value.message.startswith(f"{caught.value.param}: ")
    return caught.value.message


def test_what_is_refused_names_the_place_and_the_mend() -> None:
    found = {name: refusal(changes)[: len(expected)] for name, (changes, expected) in REFUSED.items()}
    assert found == {name: expected for name, (_, expected) in REFUSED.items()}


def test_what_a_stage_refuses_has_the_clients_name() -> None:
    conversation = Conversation()
    body = result(IMAGE, TEXT) | {"system": "x", "tools": [{"type": "bash_20250124", "name": "bash"}, LAMP]}
    conversation.read(parsed(body))
    names = {
        "messages[0].content[0]": "system",
        "messages[1].content[0]": "messages[0].content[0].text",
        "messages[2].tool_calls[0].function.arguments": "messages[1].content[0].input",
        "messages[3].content[0]": "messages[2].content[0].content[0].source",
        "messages[3]": "messages[2].content[0]",
        "tools[0].function.parameters.x": "tools[1].input_schema.x",
        "tools[0].function.name": "tools[1].name",
        "tool_choice.function.name": "tool_choice.name",
        "response_format.json_schema.schema": "output_config.format.schema",
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "stop_token_ids": "stop_token_ids",
        "messages": "messages",
    }
    assert {name: conversation.own_name(name) for name in names} == names


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any, name: Any = None) -> Any:
    """A copy of `body` with another value, or another name, at `path`."""
    copied = copy.deepcopy(body)
    *before, last = path
    holder = copied
    for part in before:
        holder = holder[part]
    if name is not None:
        holder[name] = holder.pop(last)
    else:
        holder[last] = value
    return copied


RICH: dict[str, Any] = {
    **ASK,
    "system": [TEXT],
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "thinking": {"type": "adaptive"},
    "tools": [LAMP],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "quartet": {"thinker": {"use_audio_in_video": False}},
    "messages": [
        {"role": "user", "content": [TEXT, IMAGE, {"type": "document", "title": "T", "source": NOTES}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, TEXT, CALL]},
        *result(TEXT, IMAGE)["messages"][2:],
    ],
}
ODD = (None, True, -1, 10**40, 0.5, "", "\x00é", [], [None], {}, {"type": None}, {"": []}, [[[]]])


def test_odd_bodies_are_read_or_refused_and_nothing_else() -> None:
    """Whatever a member says: no error of ours."""
    read(RICH)
    refusals = list[ApiError]()
    for path in places(RICH):
        for value in ODD:
            try:
                read(changed(RICH, path, value))
            except ApiError as error:
                refusals.append(error)
    assert len(refusals) > 300
    assert {error.status for error in refusals} == {400}
    told = {error.message for error in refusals}
    assert not [each for each in told if any(word in each for word in ("gateway.", "function-", "<class", "_tool]"))]


def test_every_misspelt_member_is_refused_by_its_name() -> None:
    free = ("input_schema", "input", "schema")  # what is in them is the client's own
    for path in places(RICH):
        *before, last = path
        if not isinstance(last, str) or any(part in free for part in before):
            continue
        message = refusal(changed(RICH, path, None, f"{last}x"))
        assert f"{last}x: unknown parameter" in message or last in ("type", "role"), message


def test_a_count_takes_what_a_message_takes() -> None:
    body = {name: value for name, value in RICH.items() if name != "max_tokens"}
    assert validated_json(CountRequest, json.dumps(body)).max_tokens is None
    assert parsed({"stream": True}, CountRequest).max_tokens == 9
