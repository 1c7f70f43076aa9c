"""Tasks that the model hands to others: to the client, or to functions of the client's by Responses' events.

One thinker speaks and calls functions, so a delegation to Responses is the calls of its answer, and the answer to their
outputs. A delegation to the client is a call of a function that the client does not know of."""

import time
from collections.abc import Callable
from typing import Any

from gateway.dialects.live.events import unsupported
from gateway.dialects.live.session_config import DELEGATE
from gateway.dialects.realtime.events import RealtimeError, new_id, server_event, wrong

# Of responses; others are incomplete. One that the user has interrupted is complete: clients report any other as an
# error of the model that they delegated to.
_STATUSES = {"completed": "completed", "cancelled": "completed", "failed": "failed"}
_OF_CALLS = ("response.function_call_arguments.delta", "response.function_call_arguments.done")


class _Delegating:
    """
    Args:
        put: sends an event.
        after_user: runs an action when the user's words have been sent: clients take the task from them.
    """

    def __init__(
        self,
        put: Callable[[dict[str, Any]], None],
        now_ms: Callable[[], int],
        after_user: Callable[[Callable[[], None]], None],
    ) -> None:
        self._put, self._now_ms, self._after_user = put, now_ms, after_user


class ClientDelegations(_Delegating):
    """Tasks of the client."""

    def __init__(self, *sinks: Any) -> None:
        super().__init__(*sinks)
        self._calls: dict[str, str] = {}  # ids of calls that wait for an answer, by that of the task

    def take(self, event: dict[str, Any]) -> None:
        """Processes an event of the realtime session."""
        if event["type"] != "response.output_item.done":
            return
        item = event["item"]
        if item["type"] == "function_call" and item["name"] == DELEGATE and item["status"] == "completed":
            id = new_id("dlg")
            self._calls[id] = item["call_id"]
            self._after_user(lambda: self._put(_created(id, "client", self._now_ms())))

    def answered(self, delegation_id: str) -> str | None:
        """Id of the call that the client answers; None: the task was answered before."""
        return self._calls.pop(delegation_id, None)

    def is_open(self, delegation_id: str) -> bool:
        return delegation_id in self._calls

    def check_output(self, item: dict[str, Any]) -> None:
        """Raises RealtimeError: outputs are for functions."""
        raise unsupported("item", "requires Responses delegation; answer by session.commentary.append")

    def check_answered(self) -> None:
        """Raises RealtimeError."""
        raise unsupported("type", "response.create requires Responses delegation")

    def go_on(self) -> None:
        pass


class ResponsesDelegations(_Delegating):
    """Calls of the client's functions."""

    def __init__(self, *sinks: Any) -> None:
        super().__init__(*sinks)
        self._response: dict[str, Any] = {}  # that goes on
        self._id: str | None = None  # of the delegation that it belongs to
        self._next_id: str | None = None  # of the delegation that the next response continues
        self._last_id: str | None = None
        self._sequence = 0
        self._unanswered = set[str]()  # ids of calls

    def take(self, event: dict[str, Any]) -> None:
        """Processes an event of the realtime session."""
        kind = event["type"]
        if kind == "response.created":
            self._response, self._sequence = event["response"], 0
            self._id, self._next_id = self._next_id, None
            if self._id is not None:
                self._wrap("response.created", response=_snapshot(self._response, "in_progress"))
        elif kind == "response.done":
            self._end(event["response"])
        elif kind in ("response.output_item.added", "response.output_item.done"):
            self._take_item(kind, event)
        elif kind in _OF_CALLS:
            names = ("item_id", "output_index", "delta", "arguments", "name")
            self._wrap(kind, **{name: event[name] for name in names if name in event})

    def _take_item(self, kind: str, event: dict[str, Any]) -> None:
        item = {name: value for name, value in event["item"].items() if name != "object"}
        if item["type"] == "message":
            return
        if self._id is None:
            self._begin()
        if "result" in item:  # an image would be larger than messages that clients take
            item["result"] = None
        is_done = kind.endswith("done")
        if is_done and item["type"] == "function_call" and item["status"] == "completed":
            self._unanswered.add(item["call_id"])
        self._wrap(kind, output_index=event["output_index"], item=item)

    def _begin(self) -> None:
        id = self._id = self._last_id = new_id("dlg")
        created = _created(id, "responses", self._now_ms(), response_id=self._response["id"])
        self._after_user(lambda: self._put(created))
        self._wrap("response.created", response=_snapshot(self._response, "in_progress"))

    def _end(self, response: dict[str, Any]) -> None:
        if self._id is not None:
            status = _STATUSES.get(response["status"], "incomplete")
            self._wrap(f"response.{status}", response=_snapshot(response, status))
        self._id = None

    def _wrap(self, kind: str, **members: Any) -> None:
        event = {"type": kind, "sequence_number": self._sequence, **members}
        self._sequence += 1
        wrapped = server_event("response.event", delegation_id=self._id, event=event)
        self._after_user(lambda: self._put(wrapped))

    def answered(self, delegation_id: str) -> str | None:
        return None

    def is_open(self, delegation_id: str) -> bool:
        return False

    def check_output(self, item: dict[str, Any]) -> None:
        """Notes the output of a call. Raises RealtimeError: no such call waits for one."""
        call_id = item.get("call_id")
        if item.get("type") == "function_call_output":
            if call_id not in self._unanswered:
                raise wrong("item.call_id", "no call of that id waits for its output")
            self._unanswered.discard(call_id)

    def check_answered(self) -> None:
        """Raises RealtimeError: a call has no output."""
        if self._unanswered:
            reason = f"outputs are missing of {', '.join(sorted(self._unanswered))}; send them by response.item.create"
            raise RealtimeError("function_call_outputs_required", reason)

    def go_on(self) -> None:
        """The next response continues the last delegation."""
        self._next_id = self._last_id


Delegations = ClientDelegations | ResponsesDelegations


def _created(id: str, target: str, offset_ms: int, **members: Any) -> dict[str, Any]:
    delegation = {"id": id, "type": "delegation", "target": target, **members}
    return server_event("session.delegation.created", delegation=delegation, offset_ms=offset_ms)


def _snapshot(response: dict[str, Any], status: str) -> dict[str, Any]:
    """OpenAI's Responses form of a realtime response, without what it was asked and what it has made."""
    details, made = response.get("status_details") or {}, response.get("usage")
    error, usage = details.get("error"), None
    if made is not None:
        cached = made["input_token_details"]["cached_tokens"]
        usage = {
            "input_tokens": made["input_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": made["output_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": made["total_tokens"],
        }
    return {
        "id": response["id"],
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": error and {"code": "server_error", "message": error["message"]},
        "incomplete_details": {"reason": "max_output_tokens"} if details.get("reason") == "max_output_tokens" else None,
        "instructions": None,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "metadata": {},
        "model": "",
        "output": [],
        "usage": usage,
    }
