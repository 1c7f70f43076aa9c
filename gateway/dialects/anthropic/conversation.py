"""A request as a chat request, and what the client calls what a chat's refusal names."""

import json
import re
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import Any

from gateway.answers import conversation as chat
from gateway.answers.request import (
    ChatCompletionRequest,
    FunctionTool,
    JsonSchema,
    JsonSchemaFormat,
    NamedFunction,
    QuartetOptions,
    Tool,
    ToolChoice,
)
from gateway.dialects.anthropic import blocks
from gateway.dialects.anthropic.schema import MessagesRequest, OwnTool
from gateway.errors import invalid
from gateway.pipeline.sampling import ThinkerSampling

# Claude Code's first line differs in each request: with it, no prompt would begin like another.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
_NO_FILES = "there are no uploaded files here; send the file as base64, or its URL"
_NO_PDF = "documents are read as text; send the text as a source of type text, or the pages as images"
_SEALED = "quartet.1."
_MODES = {"auto": "auto", "any": "required", "tool": "function", "none": "none"}
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "tool_choice.function.name": "tool_choice.name",
}


def sealed(thought: str) -> str:
    """A signature that has the thought. It is not secret."""
    return _SEALED + b64encode(thought.encode()).decode()


def _thought(block: blocks.ThinkingBlock) -> str:
    """What the block shows, or its signature has; "" if another server made that."""
    if block.thinking or not block.signature.startswith(_SEALED):
        return block.thinking
    try:
        return b64decode(block.signature.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return ""


@dataclass
class Conversation:
    """The messages and tools of a request in a chat's form.

    Attributes:
        names: the client's names of places in the chat.
    """

    messages: list[Any] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=lambda: dict(_NAMES))
    _call_ids: set[str] = field(default_factory=set)

    def own_name(self, member: str) -> str:
        """The client's name of a member of the chat."""
        fitting = [name for name in self.names if re.match(re.escape(name) + r"(?![\w])", member)]
        longest = max(fitting, key=len, default="")
        return self.names[longest] + member[len(longest) :] if longest else member

    def read(self, request: MessagesRequest) -> None:
        """Raises ApiError: 400 naming the member at fault."""
        if request.system:
            self._system("system", request.system)
        for i, message in enumerate(request.messages):
            place = f"messages[{i}]"
            match message:
                case blocks.SystemTurn():
                    self._system(place, message.content)
                case blocks.AssistantTurn():
                    self._assistant(place, message)
                case blocks.UserTurn():
                    self._user(place, message)
        if isinstance(request.messages[-1], blocks.AssistantTurn):
            reason = "the last message must be the user's: an answer that was begun is not continued here"
            raise invalid(f"messages[{len(request.messages) - 1}]", reason)
        for i, tool in enumerate(request.tools or ()):
            if isinstance(tool, OwnTool):
                function = FunctionTool.model_construct(
                    name=tool.name, description=tool.description, parameters=tool.input_schema
                )
                self.names[f"tools[{len(self.tools)}].function.parameters"] = f"tools[{i}].input_schema"
                self.names[f"tools[{len(self.tools)}].function"] = f"tools[{i}]"
                self.names[f"tools[{len(self.tools)}]"] = f"tools[{i}]"
                self.tools.append(Tool.model_construct(type="function", function=function))

    def _add(self, place: str, message: Any, parts: list[str]) -> None:
        own = f"messages[{len(self.messages)}]"
        self.names[own] = place
        self.names |= {f"{own}.content[{j}]": part for j, part in enumerate(parts)}
        self.messages.append(message)

    def _system(self, place: str, texts: list[blocks.TextBlock]) -> None:
        read = [_BILLING.sub("", block.text) if place == "system" else block.text for block in texts]
        if text := "\n\n".join(filter(None, read)):
            self._add(place, chat.SystemMessage(role="system", content=[_text(text)]), [place])

    def _assistant(self, place: str, message: blocks.AssistantTurn) -> None:
        texts, parts, calls, thoughts = [], [], [], []
        own = f"messages[{len(self.messages)}]"
        for j, block in enumerate(message.content):
            at = f"{place}.content[{j}]"
            match block:
                case blocks.TextBlock(text=text):
                    texts.append(chat.AnswerText(type="text", text=text))
                    parts.append(f"{at}.text")
                case blocks.ThinkingBlock():
                    thoughts.append(_thought(block))
                case blocks.ToolUseBlock(id=call_id, name=name, input=members):
                    self.names[f"{own}.tool_calls[{len(calls)}].function.arguments"] = f"{at}.input"
                    calls.append(chat.ToolCall.of(call_id, name, json.dumps(members, ensure_ascii=False)))
                    self._call_ids.add(call_id)
        thought = "".join(thoughts)
        if texts or calls or thought:
            read = chat.AssistantMessage(role="assistant", content=texts or None, reasoning_content=thought or None)
            read.tool_calls = calls or None
            self._add(place, read, parts)

    def _user(self, place: str, message: blocks.UserTurn) -> None:
        """Results of tools are messages of their own, in the order of the blocks."""
        shown, parts = list[Any](), list[str]()

        def add() -> None:
            if shown:
                self._add(place, chat.UserMessage(role="user", content=[*shown]), parts)
                shown.clear()
                parts.clear()

        for j, block in enumerate(message.content):
            at = f"{place}.content[{j}]"
            if isinstance(block, blocks.ToolResultBlock):
                add()
                self._result(at, block)
                continue
            for part, name in _shown(block, at):
                shown.append(part)
                parts.append(name)
        add()

    def _result(self, place: str, block: blocks.ToolResultBlock) -> None:
        if block.tool_use_id not in self._call_ids:
            reason = (
                f"no tool_use {block.tool_use_id[:64]!r} comes before it; send the assistant's message with it, too"
            )
            raise invalid(f"{place}.tool_use_id", reason)
        read = [(_text("Error: "), place)] if block.is_error else []
        for j, inner in enumerate(block.content or ()):
            read += _shown(inner, f"{place}.content[{j}]")
        content: list[Any] = [part for part, _ in read] or [_text("")]
        message = chat.ToolMessage(role="tool", content=content, tool_call_id=block.tool_use_id)
        self._add(place, message, [name for _, name in read])


def _text(text: str) -> chat.TextPart:
    return chat.TextPart(type="text", text=text)


def _shown(block: blocks.Shown, place: str) -> list[tuple[Any, str]]:
    """The block as parts of a chat, each with its place. Raises ApiError: 400, it cannot be read here."""
    match block:
        case blocks.TextBlock(text=text):
            return [(_text(text), f"{place}.text")]
        case blocks.ImageBlock():
            return [(_image(block, place), f"{place}.source")]
        case blocks.SearchResultBlock(source=source, title=title):
            inner = [(_text(text.text), f"{place}.content[{i}].text") for i, text in enumerate(block.content)]
            return _document({"source": source, "title": title}, inner, place)
        case blocks.DocumentBlock(source=blocks.TextSource(data=text), title=title, context=context):
            inner = [(_text(text), f"{place}.source.data")]
            return _document({"title": title, "context": context}, inner, place)
        case blocks.DocumentBlock(source=blocks.ContentSource(content=content), title=title, context=context):
            inner = [each for i, one in enumerate(content) for each in _shown(one, f"{place}.source.content[{i}]")]
            return _document({"title": title, "context": context}, inner, place)
        case blocks.DocumentBlock(source=blocks.FileSource()):
            raise invalid(f"{place}.source.file_id", _NO_FILES)
        case _:
            raise invalid(f"{place}.source", _NO_PDF)


def _document(about: dict[str, str | None], inner: list[tuple[Any, str]], place: str) -> list[tuple[Any, str]]:
    """What a document has, between marks that say what is known of it."""
    head = "".join(f"{name}: {said}\n" for name, said in about.items() if said)
    return [(_text(f"<document>\n{head}"), place), *inner, (_text("\n</document>\n"), place)]


def _image(block: blocks.ImageBlock, place: str) -> chat.ImagePart:
    match block.source:
        case blocks.Base64Source(data=data):
            url = f"data:;base64,{data}"
        case blocks.UrlSource(url=url):
            pass
        case _:
            raise invalid(f"{place}.source.file_id", _NO_FILES)
    return chat.ImagePart(type="image_url", image_url=chat.ImageUrl(url=url))


def chat_request(request: MessagesRequest, conversation: Conversation) -> ChatCompletionRequest:
    """The chat request of `conversation`. Raises ApiError: 400 naming the member at fault."""
    config = request.output_config
    format_ = (config and config.format) or request.output_format
    schema = JsonSchema.model_validate({"name": "answer", "schema": format_.json_schema}) if format_ else None
    return ChatCompletionRequest.model_construct(
        **{name: getattr(request, name) for name in ThinkerSampling.model_fields},
        model=request.model,
        stop=request.stop_sequences,
        messages=conversation.messages,
        tools=conversation.tools or None,
        tool_choice=_choice(request, conversation),
        response_format=schema and JsonSchemaFormat(type="json_schema", json_schema=schema),
        quartet=QuartetOptions(thinker=request.quartet.thinker),
    )


def _choice(request: MessagesRequest, conversation: Conversation) -> ToolChoice | None:
    choice = request.tool_choice
    if choice is None or (choice.type in ("auto", "none") and not conversation.tools):
        return None
    if not conversation.tools:
        raise invalid("tool_choice", "there is no tool to call: give tools with an input_schema, or say auto")
    if choice.name is not None and choice.name not in (tool.function.name for tool in conversation.tools):
        raise invalid("tool_choice.name", f"{choice.name[:64]!r} is not one of the tools that are of use here")
    return ToolChoice(type=_MODES[choice.type], function=NamedFunction(name=choice.name) if choice.name else None)
