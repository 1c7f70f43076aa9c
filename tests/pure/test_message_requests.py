"""What the thinker reads of a request in Anthropic's form, and what is refused by which name."""

import json
from typing import Any, cast

from google.protobuf.json_format import MessageToDict

from gateway.answers.gateway import Gateway
from gateway.answers.prompt_messages import fill_messages, fill_tools
from gateway.dialects.anthropic.conversation import Conversation, chat_request, sealed
from gateway.dialects.anthropic.schema import MessagesRequest
from gateway.errors import ApiError
from gateway.pipeline.balance import prompt_key
from gateway.validation import validated_json
from quartet.v1 import thinker_pb2

ASK: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"}}
LAMP: dict[str, Any] = {
    "name": "lamp",
    "description": "turns it on",
    "input_schema": {"type": "object", "properties": {"on": {"type": "boolean"}}},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "lamp", "input": {"on": True}}
CALLED = [{"role": "user", "content": "light"}, {"role": "assistant", "content": [CALL]}]
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=cli;"


def parsed(
    changes: dict[str, Any], model: type[MessagesRequest] = MessagesRequest, ignored: set[str] | None = None
) -> MessagesRequest:
    return validated_json(model, json.dumps(ASK | changes), ignored)


def read(changes: dict[str, Any]) -> tuple[thinker_pb2.GenerateStart, Any]:
    """(what the thinker gets of the conversation, the chat request)."""
    request, conversation, start = parsed(changes), Conversation(), thinker_pb2.GenerateStart()
    try:
        conversation.read(request)
        chat = chat_request(request, conversation)
        for part, file in fill_messages(start, cast(Gateway, None), chat.messages, None):
            part.media.data = file.url.encode()
            part.media.field = conversation.own_name(part.media.field)
        fill_tools(start, chat.tools, chat.tool_choice)
    except ApiError as error:
        if error.param:
            error.rename(conversation.own_name(error.param))
        raise
    return start, chat


def brief(start: thinker_pb2.GenerateStart) -> list[tuple[Any, ...]]:
    """(role, texts and places of media, then what else there is) of each message."""
    found = []
    for message in start.messages:
        parts = [part.text if part.WhichOneof("content") == "text" else (part.media.field,) for part in message.content]
        calls = [(call.id, call.name, json.loads(call.arguments_json)) for call in message.tool_calls]
        rest = [each for each in (message.reasoning, calls, message.tool_call_id) if each]
        found.append((message.role, parts, *rest))
    return found


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def result(*content: Any, **members: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": list(content)}
    return {"messages": [*CALLED, {"role": "user", "content": [block | members]}]}


TEXT = {"type": "text", "text": "see"}
NOTES = {"type": "text", "media_type": "text/plain", "data": "notes"}
AFTER_CALL = [("user", ["light"]), ("assistant", [], [("toolu_1", "lamp", {"on": True})])]
ANSWERED: dict[str, Any] = {"role": "user", "content": "and?"}
READ: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {
    "a text": ({}, [("user", ["hi"])]),
    "blocks": (user(TEXT, IMAGE, TEXT), [("user", ["see", ("messages[0].content[1].source",), "see"])]),
    "a system's text": ({"system": "be brief"}, [("system", ["be brief"]), ("user", ["hi"])]),
    "a system's blocks": (
        {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, TEXT]},
        [("system", ["a\n\nsee"]), ("user", ["hi"])],
    ),
    "an empty system": ({"system": ""}, [("user", ["hi"])]),
    "a billing header": (
        {"system": [{"type": "text", "text": BILLING.format("f1d")}, TEXT]},
        [("system", ["see"]), ("user", ["hi"])],
    ),
    "a billing header before more": (
        {"system": BILLING.format("f1d") + "\nbe brief"},
        [("system", ["be brief"]), ("user", ["hi"])],
    ),
    "a system in the midst": (
        {"messages": [ASK["messages"][0], {"role": "system", "content": "now in French"}]},
        [("user", ["hi"]), ("system", ["now in French"])],
    ),
    "a text document": (
        user({"type": "document", "title": "T", "context": "C", "source": NOTES, "citations": {"enabled": False}}),
        [("user", ["<document>\ntitle: T\ncontext: C\n", "notes", "\n</document>\n"])],
    ),
    "a document of blocks": (
        user({"type": "document", "source": {"type": "content", "content": [TEXT, IMAGE]}}),
        [
            (
                "user",
                ["<document>\n", "see", ("messages[0].content[0].source.content[1].source",), "\n</document>\n"],
            )
        ],
    ),
    "a search result": (
        user({"type": "search_result", "source": "a.example", "title": "T", "content": [TEXT]}),
        [("user", ["<document>\nsource: a.example\ntitle: T\n", "see", "\n</document>\n"])],
    ),
    "a tool's result": (result(TEXT), [*AFTER_CALL, ("tool", ["see"], "toolu_1")]),
    "a tool's result without content": (result(content=None), [*AFTER_CALL, ("tool", [""], "toolu_1")]),
    "a tool's empty result": (result(), [*AFTER_CALL, ("tool", [""], "toolu_1")]),
    "a tool's text": (result(content="on"), [*AFTER_CALL, ("tool", ["on"], "toolu_1")]),
    "a tool's error": (
        result(content="broken", is_error=True),
        [*AFTER_CALL, ("tool", ["Error: ", "broken"], "toolu_1")],
    ),
    "a tool's picture": (
        result(IMAGE, TEXT),
        [*AFTER_CALL, ("tool", [("messages[2].content[0].content[0].source",), "see"], "toolu_1")],
    ),
    "a result between texts": (
        {"messages": [*CALLED, {"role": "user", "content": [TEXT, *result(TEXT)["messages"][2]["content"], IMAGE]}]},
        [*AFTER_CALL, ("user", ["see"]), ("tool", ["see"], "toolu_1"), ("user", [("messages[2].content[2].source",)])],
    ),
    "an answer as it was sent": (
        {
            "messages": [
                ASK["messages"][0],
                {
                    "id": "msg_1",
                    "type": "message",
                    "role": "assistant",
                    "model": "m",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "another server's"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "so", "citations": None},
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                        CALL | {"caller": {"type": "direct"}},
                    ],
                    "stop_reason": "tool_use",
                    "stop_sequence": None,
                    "usage": {"input_tokens": 1, "output_tokens": 1},
                },
                ANSWERED,
            ]
        },
        [("user", ["hi"]), ("assistant", ["so"], "hm", [("toolu_1", "lamp", {"on": True})]), ("user", ["and?"])],
    ),
    "a thought in its signature": (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": sealed("hm é")}]},
                ANSWERED,
            ]
        },
        [("assistant", [], "hm é"), ("user", ["and?"])],
    ),
    "a thought that nobody can read": (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": "quartet.1.!"}]},
                ANSWERED,
            ]
        },
        [("user", ["and?"])],
    ),
    "an interrupted answer": ({"messages": [{"role": "assistant", "content": []}, ANSWERED]}, [("user", ["and?"])]),
}


def test_what_the_thinker_reads() -> None:
    assert {name: brief(read(changes)[0]) for name, (changes, _) in READ.items()} == {
        name: messages for name, (_, messages) in READ.items()
    }


def test_tools_and_their_choice() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    tools = {"tools": [search, LAMP | {"cache_control": {"type": "ephemeral"}, "type": "custom"}]}
    modes = {"auto": "MODE_AUTO", "any": "MODE_REQUIRED", "none": "MODE_NONE"}
    for kind, mode in modes.items():
        start, _ = read(tools | {"tool_choice": {"type": kind}})
        assert MessageToDict(start.tool_choice) == {"mode": mode}
    start, _ = read(tools | {"tool_choice": {"type": "tool", "name": "lamp", "disable_parallel_tool_use": True}})
    assert MessageToDict(start.tool_choice) == {"mode": "MODE_FUNCTION", "name": "lamp"}
    (tool,) = start.tools
    assert (tool.name, tool.description, json.loads(tool.parameters_json)) == tuple(LAMP.values())
    assert not read({"tools": [search], "tool_choice": {"type": "auto"}})[0].HasField("tool_choice")


def test_how_the_answer_is_written() -> None:
    given = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7, "stop_sequences": ["a", "b"]}
    schema = {"type": "object"}
    for member in ({"output_format": None, "output_config": {"format": None, "effort": "high"}}, {}):
        assert read(given | member)[1].response_format is None
    format_ = {"type": "json_schema", "schema": schema}
    for member in ({"output_config": {"format": format_}}, {"output_format": format_}):
        _, chat = read(given | member)
        assert chat.response_format.json_schema.json_schema == schema
    assert (chat.temperature, chat.top_k, chat.top_p, chat.seed, chat.max_tokens) == (0.5, 3, 0.9, 7, 9)
    assert chat.stop == ["a", "b"]
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    assert read({"quartet": {"thinker": kwargs}})[1].quartet.thinker.model_dump(exclude_none=True) == kwargs


def test_a_varying_billing_header_spoils_no_prefix() -> None:
    """Claude Code's first block of the system differs in each request."""
    first, second = (
        read({"system": [{"type": "text", "text": BILLING.format(n)}, TEXT], "tools": [LAMP]})[0] for n in ("a", "b")
    )
    assert first == second
    assert prompt_key(first, []) == prompt_key(second, [])


def test_members_without_effect_are_named() -> None:
    habits = {"metadata": {"user_id": "u"}, "service_tier": "auto", "container": None, "thinking": {"type": "adaptive"}}
    habits |= {
        "output_config": {"effort": "high"},
        "context_management": {"edits": []},
        "tools": [LAMP | {"strict": True}],
    }
    cached = user({**TEXT, "cache_control": {"type": "ephemeral"}})
    ignored = set[str]()
    parsed({}, ignored=ignored)
    assert not ignored
    parsed(habits | cached, ignored=ignored)
    assert ignored == {"metadata", "service_tier", "effort", "context_management", "strict", "cache_control"}
