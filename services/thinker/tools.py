"""Finding tool calls in an answer: in the families' form or, by a parser of vLLM's registry, in another model's."""

import json
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput
from services.thinker.family import ToolCallMarkers
from services.thinker.structure import Format

if TYPE_CHECKING:
    from vllm.tool_parsers import ToolParser

# A name with an escape that JSON lacks, or with half a surrogate pair, is none.
_NAME = r'"(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*"'
_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*({_NAME})\s*,\s*"arguments"\s*:\s*(?=\S)', re.DOTALL)


class ToolCallParser:
    """Separates an answer, as it arrives, into text and tool calls `{"name": ..., "arguments": {...}}`.

    Arguments are passed on as they arrive. What looks like a call but is none, or is of no tool, becomes text again.

    Args:
        names: of the tools.
        forced: the whole answer is one call, without the markers.
    """

    def __init__(self, markers: ToolCallMarkers, names: Collection[str], forced: bool = False) -> None:
        self._opening, self._closing, self._names = markers.opening, markers.closing, names
        self._forced = forced
        self._pending = ""
        self._arguments = _JsonEnd()  # of the call that is being read
        self.calls = 0
        # The step for what comes next; it says whether another one may be possible.
        self._step: Callable[[ToolCallParser, thinker_pb2.GenerateDelta], bool]
        self._step = ToolCallParser._read_head if forced else ToolCallParser._read_text

    def feed(self, text: str, token_ids: Sequence[int] = (), is_last: bool = False) -> thinker_pb2.GenerateDelta:
        """Takes the next piece of the answer: the text and the parts of calls that are known by now."""
        self._pending += text
        delta = thinker_pb2.GenerateDelta()
        while self._step(self, delta):
            pass
        if is_last:
            delta.text += self._held_back()
        return delta

    def _held_back(self) -> str:
        """What is text after all, once the answer is complete."""
        rest, self._pending = self._pending, ""
        if self._step in (ToolCallParser._read_arguments, ToolCallParser._read_closing):
            return ""
        return self._opening + rest if self._step is ToolCallParser._read_head and not self._forced else rest

    def _read_text(self, delta: thinker_pb2.GenerateDelta) -> bool:
        before, opening, after = self._pending.partition(self._opening)
        if opening:
            delta.text += before
            self._pending, self._step = after, ToolCallParser._read_head
            return True
        held = next((n for n in range(len(self._opening) - 1, 0, -1) if before.endswith(self._opening[:n])), 0)
        delta.text += before[: len(before) - held]
        self._pending = before[len(before) - held :]
        return False

    def _read_head(self, delta: thinker_pb2.GenerateDelta) -> bool:
        head = _HEAD.match(self._pending)
        if head and (name := json.loads(head.group(1), strict=False)) in self._names:
            delta.tool_calls.add(index=self.calls, id=f"call_{uuid.uuid4().hex}", name=name)
            self._pending, self._arguments = self._pending[head.end() :], _JsonEnd()
            self._step = ToolCallParser._read_arguments
            self.calls += 1
            return True
        before, closing, after = self._pending.partition(self._closing)
        if not closing:
            return False
        delta.text += f"{self._opening}{before}{self._closing}"  # not a call of ours
        self._pending = after
        if not self._forced:
            self._step = ToolCallParser._read_text
        return True

    def _read_arguments(self, delta: thinker_pb2.GenerateDelta) -> bool:
        end = self._arguments.find(self._pending)
        piece, self._pending = self._pending[:end], self._pending[len(self._pending) if end is None else end :]
        if piece:
            delta.tool_calls.add(index=self.calls - 1, arguments_json=piece)
        if end is not None:
            self._step = ToolCallParser._read_closing
        return end is not None

    def _read_closing(self, delta: thinker_pb2.GenerateDelta) -> bool:
        _, closing, after = self._pending.partition(self._closing)
        if not closing or self._forced:
            return False
        self._pending, self._step = after, ToolCallParser._read_text
        return True


class _JsonEnd:
    """Finds where a JSON object that arrives in pieces ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Index just after the end; None: it is not in `text`, the next piece."""
        for i, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None


def find_parser(name: str, tokenizer: Any) -> "type[ToolParser]":
    """vLLM's parser `name`. Raises ValueError: there is none, or it does not work with this tokenizer."""
    from vllm.tool_parsers import ToolParserManager

    try:
        parser = ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}))
        raise ValueError(f"--tool-call-parser {name}: vLLM has no such parser; it has {known}") from None
    try:
        parser(tokenizer, [])
    except Exception as error:  # they raise what they like, for want of a token
        raise ValueError(f"--tool-call-parser {name}: is not for this model's tokenizer: {error}") from error
    return parser


class NamedToolParser:
    """Separates an answer into text and calls of `tools`, as `ToolCallParser` does. Of a call of no tool, name and
    arguments become text.

    Attributes:
        calls: found so far.
        reads_special_tokens: the parser looks for special tokens, which must be in the text.
    """

    def __init__(self, parser: "type[ToolParser]", tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        members: dict[str, Any] = {"messages": [], "tools": list(tools), "tool_choice": "auto"}
        request = ChatCompletionRequest(**members)
        self._parser: Any = parser(tokenizer, request.tools)  # pyright: ignore[reportArgumentType]
        self._request: Any = self._parser.adjust_request(request)
        self._names = {tool["function"]["name"] for tool in tools}
        self._indices: dict[int, int | None] = {}  # of the calls that are told; None: it is of no tool
        self._text = ""
        self._token_ids: list[int] = []
        self.calls = 0
        self.reads_special_tokens = not self._request.skip_special_tokens

    def feed(self, text: str, token_ids: Sequence[int] = (), is_last: bool = False) -> thinker_pb2.GenerateDelta:
        """See `ToolCallParser.feed`."""
        delta = thinker_pb2.GenerateDelta()
        if text or token_ids:
            all_text, all_ids = self._text + text, [*self._token_ids, *token_ids]
            found = self._parser.extract_tool_calls_streaming(
                self._text, all_text, text, self._token_ids, all_ids, list(token_ids), self._request
            )
            self._add(delta, found)
            self._text, self._token_ids = all_text, all_ids
        if is_last:  # the parser may have held something back
            if delta.tool_calls and (rest := self._parser.get_remaining_unstreamed_args()):
                delta.tool_calls[-1].arguments_json += rest
            if self._parser.engine_based_streaming:
                self._add(delta, self._parser.finish_streaming())
        return delta

    def _add(self, delta: thinker_pb2.GenerateDelta, found: Any) -> None:
        if found is None:
            return
        delta.text += found.content or ""
        for call in found.tool_calls or ():
            function = call.function
            name, arguments = (function.name or "", function.arguments or "") if function else ("", "")
            if is_new := call.index not in self._indices:
                self._indices[call.index] = self.calls if name in self._names else None
                self.calls += name in self._names
            if (index := self._indices[call.index]) is None:
                delta.text += name + arguments
                continue
            call_id = (call.id or f"call_{uuid.uuid4().hex}") if is_new else ""
            delta.tool_calls.add(index=index, id=call_id, name=name, arguments_json=arguments)


def calls_by(parser: "type[ToolParser]", tokenizer: Any, tools: Sequence[dict[str, Any]]) -> Format:
    """One or more calls of `tools`, as a parser of vLLM's finds them.

    Raises InvalidInput: vLLM does not say how they are written.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    members: dict[str, Any] = {"messages": [], "tools": list(tools), "tool_choice": "required"}
    request = ChatCompletionRequest(**members)
    tag = parser(tokenizer, request.tools).get_structural_tag(request)  # pyright: ignore[reportArgumentType]
    if tag is None:
        raise InvalidInput("tools", "with this model's --tool-call-parser they cannot be beside a structured answer")
    return tag.model_dump()["format"]
