"""Tool calls in the form of another model: parsers of vLLM's registry, by name."""

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quartet.v1 import thinker_pb2

if TYPE_CHECKING:
    from vllm.tool_parsers import ToolParser


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
    """Separates an answer into text and calls of `tools`, as `services.thinker.tools.ToolCallParser` does.

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
            is_new = call.index >= self.calls
            call_id = (call.id or f"call_{uuid.uuid4().hex}") if is_new else ""
            delta.tool_calls.add(index=call.index, id=call_id, name=name, arguments_json=arguments)
            self.calls = max(self.calls, call.index + 1)
