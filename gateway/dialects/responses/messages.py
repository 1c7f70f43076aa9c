"""A response's input as a chat request: items become messages, and refusals name the items again."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.answers import conversation
from gateway.answers.extensions import TextMembers
from gateway.answers.files.parts import image_part
from gateway.answers.request import (
    ChatCompletionRequest,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    TemplateVariables,
    Tool,
    ToolChoice,
)
from gateway.answers.tools.calls import HostedTool
from gateway.answers.tools.events import made_url
from gateway.answers.tools.registry import tool_of
from gateway.dialects.responses.parts import Item, chat_parts
from gateway.dialects.responses.schema import ResponseRequest, TextFormat
from gateway.dialects.responses.tools import flat_name
from gateway.errors import invalid
from gateway.pipeline.sampling import ThinkerSampling

# Members that a chat has too, by the same name.
_SAME = (
    *(*ThinkerSampling.model_fields, *TemplateVariables.model_fields, *TextMembers.model_fields),
    *("model", "modalities", "audio", "stream", "stop", "priority", "lora", "quartet"),
)


@dataclass
class Messages:
    """A conversation as chat has it.

    Attributes:
        places: where in the request each message is; one of an earlier turn has the member that named that.
        sees_images: whether the model is shown the pictures that were made.
    """

    sees_images: bool
    messages: list[Any] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, place: str, item: Item) -> None:
        """Adds an item. Raises ApiError: 400 naming the member at fault."""
        match item["type"]:
            case "message":
                self._message(place, item)
            case "function_call":
                self._call(place, item["call_id"], flat_name(item.get("namespace"), item["name"]), item["arguments"])
            case "function_call_output":
                self._output(place, item["call_id"], chat_parts(item["output"], f"{place}.output"))
            case "reasoning":
                message = self._assistant(place, "content", "tool_calls", "reasoning_content")
                message.reasoning_content = thought(item)
            case kind if (tool := tool_of(kind)) is not None:
                self._hosted(place, item, tool)

    def _add(self, place: str, message: Any) -> None:
        self.messages.append(message)
        self.places.append(place)

    def _message(self, place: str, item: Item) -> None:
        parts = chat_parts(item["content"], f"{place}.content")
        match item["role"]:
            case "assistant":
                self._assistant(place, "content", "tool_calls").content = parts
            case "user":
                self._add(place, conversation.UserMessage(role="user", content=parts))
            case role:
                self._add(place, conversation.SystemMessage(role=role, content=parts))

    def _assistant(self, place: str, *without: str) -> conversation.AssistantMessage:
        """The last message if it is the assistant's and has none of these members, else a new one."""
        last = self.messages[-1] if self.messages else None
        if isinstance(last, conversation.AssistantMessage) and not any(getattr(last, name) for name in without):
            return last
        self._add(place, message := conversation.AssistantMessage(role="assistant"))
        return message

    def _call(self, place: str, call_id: str, name: str, arguments: str) -> None:
        call = conversation.ToolCall.of(call_id, name, arguments)
        message = self._assistant(place)
        message.tool_calls = [*(message.tool_calls or ()), call]

    def _output(self, place: str, call_id: str, parts: list[Any]) -> None:
        calls = (call for message in self.messages for call in getattr(message, "tool_calls", None) or ())
        if not any(call.id == call_id for call in calls):
            raise invalid(f"{place}.call_id", f"no call {call_id[:64]!r} comes before it; send the function_call too")
        self._add(place, conversation.ToolMessage(role="tool", content=parts, tool_call_id=call_id))

    def _hosted(self, place: str, item: Item, tool: type[HostedTool]) -> None:
        """The call of a tool that ran here, and its result as the model reads it."""
        self._call(place, item["id"], tool.name, tool.arguments(item))
        product = "video" if tool.output == "video" else "result"
        is_made = item["status"] == "completed" if tool.output is None else bool(item.get(product))
        came = tool.result(item, is_made, "the reason is not known")
        parts: list[Any] = [conversation.TextPart(type="text", text=came)]
        if is_made and tool.output == "image" and self.sees_images:
            parts.append(image_part(made_url(item)))
        self._output(place, item["id"], parts)


def last_picture(items: Sequence[Item]) -> str | None:
    """URL of the last picture, made here or sent by the user."""
    for item in reversed(items):
        tool = tool_of(item["type"])
        if tool is not None and tool.output == "image" and item.get("result"):
            return made_url(item)
        if item["type"] == "message" and item["role"] == "user":
            urls = [part.get("image_url") for part in item["content"] if part["type"] == "input_image"]
            if urls and urls[-1]:
                return urls[-1]
    return None


def thought(item: Item) -> str:
    """The text of a reasoning item: its content, or that of `sealed`, or its summary."""
    parts = item.get("content")
    if not parts and item.get("encrypted_content"):
        try:
            return base64.b64decode(item["encrypted_content"], validate=True).decode()
        except ValueError:  # another server's: nobody here can read it
            parts = None
    return "".join(part.get("text", "") for part in parts or item.get("summary") or ())


def sealed(text: str) -> str:
    """A thought as clients send it back, without reading it."""
    return base64.b64encode(text.encode()).decode()


def chat_request(
    request: ResponseRequest, messages: Sequence[Any], tools: Sequence[Tool], choice: ToolChoice | None
) -> ChatCompletionRequest:
    """The chat request with `messages` and `tools`. Raises ApiError: 400, no JSON schema."""
    return ChatCompletionRequest.model_construct(
        **{name: getattr(request, name) for name in _SAME},
        messages=list(messages),
        max_completion_tokens=request.max_output_tokens,
        tools=list(tools) or None,
        tool_choice=choice,
        response_format=_format(request.text.format if request.text else None),
        logprobs=request.wants_logprobs or None,
        top_logprobs=request.top_logprobs if request.wants_logprobs else None,
        return_token_ids=request.enable_response_messages,
    )


def _format(text_format: TextFormat | None) -> JsonObjectFormat | JsonSchemaFormat | None:
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return JsonObjectFormat(type="json_object")
    if text_format.json_schema is None:
        raise invalid("text.format.schema", "required, but missing", "missing_required_parameter")
    schema = JsonSchema.model_validate({"name": text_format.name or "schema", "schema": text_format.json_schema})
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(.*)")
_NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "tool_choice.function.name": "tool_choice.name",
    "messages": "input",
}


def own_name(param: str, places: Sequence[str], tool_places: Sequence[str]) -> str:
    """The response's name of a member of the chat request; the places are those of its messages and tools."""
    if match := _MESSAGE.match(param):
        place = places[int(match[1])] if int(match[1]) < len(places) else "input"
        return place + match[2] if place.startswith("input[") and "tool_calls" not in match[2] else place
    if match := _TOOL.match(param):
        return (tool_places[int(match[1])] if int(match[1]) < len(tool_places) else "tools") + match[2]
    return _NAMES.get(param, param)
