"""What a response is to be, and its object as OpenAI has it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.answers.answer import WholeAnswer, usage
from gateway.dialects.responses.parts import Item
from gateway.dialects.responses.schema import ResponseRequest
from gateway.dialects.responses.tools import Tools
from gateway.errors import ApiError

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of OpenAI's for what failed; else server_error


@dataclass
class ResponseSpec:
    """What a response is to be.

    Attributes:
        request: as the client sent it, valid by itself.
        tools: those of it that are of use here.
        earlier: items before its own, each with the request's member that named them.
        items: its own.
        id: of the response.
        request_id: names it in every stage.
        owner: whose it is; None where there are no keys.
        log: fields of the log line, filled in.
        hold: a place of its API key's for what it starts and leaves running; returns what gives the place back.
        created_at: Unix seconds.
        arrived: `time.monotonic()` then.
    """

    request: ResponseRequest
    tools: Tools
    earlier: Sequence[tuple[str, Item]]
    items: Sequence[Item]
    id: str
    request_id: str
    owner: str | None
    log: dict[str, Any]
    hold: Callable[[], Callable[[], None]]
    created_at: int = field(default_factory=lambda: int(time.time()))
    arrived: float = field(default_factory=time.monotonic)

    def public(
        self, status: Status, output: Sequence[Item], answers: Sequence[WholeAnswer], error: ApiError | None
    ) -> dict[str, Any]:
        """The response's object. `answers`: of the thinker, as far as they have come; `error`: what it failed with."""
        request, is_over = self.request, status not in ("queued", "in_progress")
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
        reasoning = request.reasoning.model_dump() if request.reasoning else {"effort": None, "summary": None}
        failure = {"code": _CODES.get(error.status, "server_error"), "message": error.message} if error else None
        last = answers[-1] if answers else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": bool(request.background),
            "error": failure,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens or request.max_tokens,
            "max_tool_calls": request.max_tool_calls,
            "model": request.model,
            "output": list(output),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "conversation": request.conversation.model_dump() if request.conversation else None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": reasoning,
            "safety_identifier": request.safety_identifier,
            "service_tier": request.service_tier or "default",
            "store": request.is_stored,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": self.tools.public,
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": request.truncation or "disabled",
            "usage": usage_of(answers) if is_over and answers else None,
            "user": request.user,
            "metadata": request.metadata or {},
            "quartet": last.quartet() if last is not None and last.has_ended else None,
        }


def usage_of(answers: Sequence[WholeAnswer]) -> dict[str, Any]:
    """Tokens of all the thinker's answers together, in OpenAI's names. A codec frame is an output token."""
    each = [usage([answer]) for answer in answers]
    read, written = ([u[f"{side}_tokens_details"] for u in each] for side in ("prompt", "completion"))

    def total(details: list[dict[str, int]], name: str) -> int:
        return sum(entry[name] for entry in details)

    read_tokens, written_tokens = (sum(u[f"{side}_tokens"] for u in each) for side in ("prompt", "completion"))
    kinds = ("cached_tokens", "audio_tokens", "image_tokens", "text_tokens")
    return {
        "input_tokens": read_tokens,
        "input_tokens_details": {"cache_write_tokens": 0} | {name: total(read, name) for name in kinds},
        "output_tokens": written_tokens,
        "output_tokens_details": {
            name: total(written, name) for name in ("reasoning_tokens", "text_tokens", "audio_tokens")
        },
        "total_tokens": read_tokens + written_tokens,
    }
