"""An answer as a message, and as the events of its stream."""

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from gateway.answers.answer import WholeAnswer, usage
from gateway.dialects.anthropic.conversation import sealed
from gateway.dialects.anthropic.schema import MessagesRequest
from gateway.pipeline.events import Event, Finished, PromptRead, TextDelta
from quartet.v1 import thinker_pb2

PING: dict[str, Any] = {"type": "ping"}
_REASONS = {thinker_pb2.FINISH_REASON_LENGTH: "max_tokens", thinker_pb2.FINISH_REASON_TOOL_CALLS: "tool_use"}


class BlockOutput:
    """One answer. Its blocks follow each other: one ends before the next begins.

    Attributes:
        answer: takes the events.
    """

    def __init__(self, request: MessagesRequest, message_id: str) -> None:
        self._request, self._id = request, message_id
        self.answer = WholeAnswer(0, message_id, 0)
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._written = ""  # of the open block: its thought, or the JSON of its call

    def take(self, event: Event) -> Iterator[dict[str, Any]]:
        """The events that follow from `event`."""
        self.answer.take(event)
        match event:
            case PromptRead():
                yield {"type": "message_start", "message": self.message()}
                yield PING
            case TextDelta(delta):
                if delta.reasoning and self._request.shows_thoughts:
                    yield from self._think(delta.reasoning)
                if delta.text:
                    yield from self._opened("text", {"text": ""})
                    yield from self._grow("text", delta.text)
                for call in delta.tool_calls:
                    yield from self._called(call)
            case Finished():
                yield from self._close()
                message = self.message()
                ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
                yield {"type": "message_delta", "delta": ended, "usage": message["usage"]}
                yield {"type": "message_stop"}

    def message(self) -> dict[str, Any]:
        """The message so far."""
        summary = self.answer.end.thinker
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [*self._blocks],
            "stop_reason": self._stop_reason(summary) if summary else None,
            "stop_sequence": summary.stop or None if summary else None,
            "usage": self._usage(),
        }

    def _stop_reason(self, summary: thinker_pb2.GenerateSummary) -> str:
        reason, most = _REASONS.get(summary.finish_reason), self._request.max_tokens
        if reason == "max_tokens" and most is not None and summary.completion_tokens < most:
            return "model_context_window_exceeded"
        return reason or ("stop_sequence" if summary.stop else "end_turn")

    def _usage(self) -> dict[str, Any]:
        """Tokens so far; those of the prefix cache are known at the end."""
        tokens = usage([self.answer])
        cached = tokens["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": tokens["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": tokens["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": tokens["completion_tokens_details"]["reasoning_tokens"]},
        }

    def _think(self, text: str) -> Iterator[dict[str, Any]]:
        yield from self._opened("thinking", {"thinking": "", "signature": ""})
        self._written += text
        if not self._request.omits_thoughts:
            yield from self._grow("thinking", text)

    def _called(self, call: thinker_pb2.ToolCallDelta) -> Iterator[dict[str, Any]]:
        most = self._request.calls_at_once
        if most is not None and call.index >= most:
            return
        if call.name:
            yield from self._close()
            call_id = f"toolu_{call.id.removeprefix('call_')}"
            yield from self._opened("tool_use", {"id": call_id, "name": call.name, "input": {}})
        if call.arguments_json:
            self._written += call.arguments_json
            yield self._delta("input_json_delta", "partial_json", call.arguments_json)

    def _opened(self, kind: str, members: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Begins a block, unless one of its kind is open."""
        if self._is_open and self._blocks[-1]["type"] == kind:
            return
        yield from self._close()
        self._is_open, self._written = True, ""
        self._blocks.append({"type": kind, **members})
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(self._blocks[-1])}

    def _grow(self, member: str, text: str) -> Iterator[dict[str, Any]]:
        self._blocks[-1][member] += text
        yield self._delta(f"{member}_delta", member, text)

    def _delta(self, kind: str, member: str, text: str) -> dict[str, Any]:
        delta = {"type": kind, member: text}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        """Ends the open block, if there is one."""
        if not self._is_open:
            return
        self._is_open, block = False, self._blocks[-1]
        if block["type"] == "thinking":
            block["signature"] = sealed(self._written)
            yield self._delta("signature_delta", "signature", block["signature"])
        elif block["type"] == "tool_use":
            block["input"] = _object(self._written)
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def _object(written: str) -> dict[str, Any]:
    """The JSON object that was written, or as much of it as there is."""
    try:
        value = from_json(written or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
