"""A response's request, and its object as OpenAI has it."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.access.api_key import ApiKey
from gateway.answers.answer import WholeAnswer, usage
from gateway.answers.files.contents import FileContent
from gateway.dialects.responses.parts import Item
from gateway.dialects.responses.schema import ResponseRequest
from gateway.dialects.responses.tools import Tools
from gateway.errors import ApiError

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
UNFINISHED = ("queued", "in_progress")  # of Status
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of OpenAI's for what failed; else server_error
# Members of the object that are those of the request.
_ECHOED = (
    *("instructions", "max_tool_calls", "model", "previous_response_id", "prompt_cache_key", "safety_identifier"),
    "user",
)


@dataclass
class ResponseSpec:
    """What a response is to be.

    Attributes:
        tools: those of the request that are of use here.
        earlier: items before its own, each with the request's member that named them.
        items: its own.
        sampling: `temperature`, `top_p`, `presence_penalty` and `frequency_penalty`, as they are used.
        request_id: names it in every stage.
        key: whose response it is; None where there are no keys.
        log: fields of the log line, filled in.
        files: uploaded ones that items name, by id.
        created_at: Unix seconds.
        arrived: `time.monotonic()` then.
    """

    request: ResponseRequest
    tools: Tools
    earlier: Sequence[tuple[str, Item]]
    items: Sequence[Item]
    sampling: Mapping[str, float]
    id: str
    request_id: str
    key: ApiKey | None
    log: dict[str, Any]
    files: Mapping[str, FileContent]
    created_at: int = field(default_factory=lambda: int(time.time()))
    arrived: float = field(default_factory=time.monotonic)

    @property
    def named_items(self) -> list[tuple[str, Item]]:
        return with_places(self.earlier, self.items)

    @property
    def owner(self) -> str | None:
        """The key's name."""
        return self.key and self.key.name

    def public(
        self, status: Status, output: Sequence[Item], answers: Sequence[WholeAnswer], error: ApiError | None
    ) -> dict[str, Any]:
        """The response's object. `answers`: the thinker's so far. `error`: what it failed with."""
        request, is_over = self.request, status not in ("queued", "in_progress")
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
        reasoning = request.reasoning.model_dump() if request.reasoning else {"effort": None, "summary": None}
        failure = {"code": _CODES.get(error.status, "server_error"), "message": error.message} if error else None
        last = answers[-1] if answers else None
        return {name: getattr(request, name) for name in _ECHOED} | {
            **self.sampling,
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": bool(request.background),
            "error": failure,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "max_output_tokens": request.max_output_tokens or request.max_tokens,
            "output": list(output),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "conversation": request.conversation.model_dump() if request.conversation else None,
            "reasoning": reasoning,
            "service_tier": request.service_tier or "default",
            "store": request.is_stored,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": self.tools.public,
            "top_logprobs": request.top_logprobs or 0,
            "truncation": request.truncation or "disabled",
            "usage": usage_of(answers) if is_over and answers else None,
            "metadata": request.metadata or {},
            "quartet": last.quartet() if last is not None and last.has_ended else None,
        }


def with_places(earlier: Sequence[tuple[str, Item]], items: Sequence[Item]) -> list[tuple[str, Item]]:
    """All items, each with its place in the request, or with the member that named an earlier turn."""
    return [*earlier, *((f"input[{i}]", item) for i, item in enumerate(items))]


def usage_of(answers: Sequence[WholeAnswer]) -> dict[str, Any]:
    """Tokens of all the thinker's answers together, in OpenAI's names. A codec frame is an output token."""
    total, read, written = Counter[str](), Counter[str](), Counter[str]()
    for tokens in (usage([answer]) for answer in answers):
        read.update(tokens.pop("prompt_tokens_details"))
        written.update(tokens.pop("completion_tokens_details"))
        total.update(tokens)
    return {
        "input_tokens": total["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0, **read},
        "output_tokens": total["completion_tokens"],
        "output_tokens_details": dict(written),
        "total_tokens": total["total_tokens"],
    }
