"""Reads the items of a response's input into the form that is stored and listed."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from gateway.answers.tools.registry import TOOLS
from gateway.dialects.responses.parts import Item, read_parts
from gateway.errors import invalid
from gateway.validation import Lenient, Listed, within

# Items of OpenAI's own tools and models. Clients send them back from other servers; no model here reads them.
_OTHERS = (
    "additional_tools, apply_patch_call, apply_patch_call_output, code_interpreter_call, compaction, computer_call, "
    "computer_call_output, configuration_update, context_compaction, custom_tool_call, custom_tool_call_output, "
    "file_search_call, local_shell_call, local_shell_call_output, mcp_approval_request, mcp_approval_response, "
    "mcp_call, mcp_list_tools, program, program_output, shell_call, shell_call_output, tool_search_call, "
    "tool_search_output, web_search_call"
)
OTHER_ITEMS = frozenset(_OTHERS.split(", "))
MAX_ITEMS = 10_000


def new_id(prefix: str) -> str:
    """An id nobody can guess, e.g. "msg_..."."""
    return f"{prefix}_{secrets.token_hex(24)}"


class Message(Lenient):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Listed[Any] = Field(default=[])


class FunctionCall(Lenient):
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    namespace: str | None = None
    arguments: str = ""


class FunctionCallOutput(Lenient):
    call_id: str = Field(min_length=1)
    output: str | Listed[Any] = ""


class Reasoning(Lenient):
    summary: Listed[Any] | None = None
    content: Listed[Any] | None = None
    encrypted_content: str | None = None


class HostedToolCall(Lenient):
    """A call of a tool that ran here. One that failed has no result."""

    result: str | None = Field(default=None, description="the file of an image or sound, in base64")
    output_format: str | None = None
    revised_prompt: str | None = Field(default=None, description="of an image")
    prompt: str | None = Field(default=None, description="of a video or sound")
    video: dict[str, Any] | None = Field(default=None, description="as in /v1/videos")
    arguments: str | None = Field(default=None, description="of a call whose result only the model reads")
    output: str | None = Field(default=None, description="that result")
    status: str | None = None


class Reference(Lenient):
    """Refers to an item of an earlier response or conversation."""

    id: str


_ITEMS: dict[str, tuple[type[Lenient], str]] = {
    "message": (Message, "msg"),
    "function_call": (FunctionCall, "fc"),
    "function_call_output": (FunctionCallOutput, "fco"),
    "reasoning": (Reasoning, "rs"),
}


def _kinds() -> dict[str, tuple[type[Lenient], str]]:
    """By type: the model, and the prefix of ids."""
    calls = {f"{name}_call": (HostedToolCall, "ig" if tool.output == "image" else "mk") for name, tool in TOOLS.items()}
    return {**_ITEMS, **calls, "item_reference": (Reference, "")}


def new_item_id(kind: str) -> str:
    return new_id(_kinds()[kind][1])


def read_items(given: str | Sequence[Any], field: str = "input") -> list[Item]:
    """Items with a type, an id and content in parts, without those of other servers' tools. Raises ApiError."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if len(given) > MAX_ITEMS:
        raise invalid(field, f"has {len(given)} items; at most {MAX_ITEMS} are taken")
    kinds = _kinds()
    items = [_item(each, f"{field}[{i}]", kinds) for i, each in enumerate(given)]
    return [item for item in items if item is not None]


def _item(given: Any, field: str, kinds: Mapping[str, tuple[type[Lenient], str]]) -> Item | None:
    """None: an item of other servers' tools."""
    if not isinstance(given, dict):
        raise invalid(field, "must be an item, an object with a type", "invalid_type")
    kind = given.get("type", "message" if "role" in given else None)
    if not isinstance(kind, str):
        raise invalid(f"{field}.type", f"required: one of {', '.join(kinds)}")
    if kind in OTHER_ITEMS and kind not in kinds:
        return None
    if kind not in kinds:
        raise invalid(f"{field}.type", f"{kind[:40]!r} is no item that is read here; use {', '.join(kinds)}")
    model, prefix = kinds[kind]
    read = within(model, given, field)
    item: Item = {name: value for name, value in given.items() if value is not None} | {"type": kind}
    if kind == "item_reference":
        return item
    if not isinstance(item.get("id"), str):
        item["id"] = new_id(prefix)
    item.setdefault("status", "completed")
    for name in ("content", "arguments", "output"):  # of interrupted turns, and of tools that return nothing
        if isinstance(empty := getattr(read, name, None), str | list) and not empty:
            item.setdefault(name, empty)
    if kind == "message":
        item["content"] = read_parts(item["content"], f"{field}.content", item["role"])
    if kind == "reasoning":
        item["summary"] = read_parts(item.get("summary", []), f"{field}.summary", "reasoning")
        if "content" in item:
            item["content"] = read_parts(item["content"], f"{field}.content", "reasoning")
    if kind == "function_call_output" and not isinstance(item["output"], str):
        item["output"] = read_parts(item["output"], f"{field}.output", "tool")
    return item
