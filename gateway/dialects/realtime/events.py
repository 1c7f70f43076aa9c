"""Parses the client's events and makes the server's. Unknown members are kept: clients send those of newer models."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.errors import ApiError
from gateway.json_bounds import check_json
from gateway.settings import MIB
from gateway.validation import OBJECT_FAULTS

Result = TypeVar("Result")
Event = TypeVar("Event", bound="ClientEvent")
MAX_AUDIO_CHARACTERS = 15 * MIB  # base64 of one append, as at OpenAI
MAX_EVENT_CHARACTERS = 16 * MIB
_LONG_CHARACTERS = MIB // 4
_MAX_ID_CHARACTERS = 512
_SHOWN_CHARACTERS = 64  # of a client's value in an error
_TAGS = ("server_vad", "semantic_vad")  # of unions, which pydantic puts into the paths of errors
# OpenAI's codes of pydantic's errors; others are invalid_type or invalid_value.
_CODES = {
    "missing": "missing_required_parameter",
    "string_too_long": "string_above_max_length",
    "extra_forbidden": "unknown_parameter",
}


class RealtimeError(ApiError):
    """A refusal in a session, which goes on. `event_id`: of the client's event at fault."""

    def __init__(
        self, code: str, message: str, param: str | None = None, event_id: str | None = None, kind: str = ""
    ) -> None:
        super().__init__(400, message, param, code, kind)
        self.event_id = event_id


def wrong(param: str, reason: str, code: str = "invalid_value", event_id: str | None = None) -> RealtimeError:
    """The refusal of the member `param`."""
    return RealtimeError(code, f"{param}: {reason}", param, event_id)


async def in_thread_if_long(characters: int, work: Callable[[], Result]) -> Result:
    """Runs `work`, in a thread if `characters` are many."""
    return await asyncio.to_thread(work) if characters > _LONG_CHARACTERS else work()


class ClientEvent(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    event_id: str | None = Field(default=None, max_length=_MAX_ID_CHARACTERS)


_Id = Annotated[str, Field(min_length=1, max_length=_MAX_ID_CHARACTERS)]
_Count = Annotated[int, Field(ge=0, lt=2**53)]


class SessionUpdate(ClientEvent):
    session: dict[str, Any]


class ModelUpdate(ClientEvent):
    """session.update of vLLM's dialect."""

    model: str


class AudioAppend(ClientEvent):
    audio: str = Field(max_length=MAX_AUDIO_CHARACTERS)


class AudioCommit(ClientEvent):
    """The sound so far becomes an item."""


class AudioClear(ClientEvent):
    """The sound so far is dropped."""


class OutputAudioClear(ClientEvent):
    """Sent with WebRTC and SIP, where the server plays the audio."""


class ItemCreate(ClientEvent):
    """`previous_item_id`: "root" for the first place, None for the last."""

    item: dict[str, Any]
    previous_item_id: _Id | None = None


class ItemRetrieve(ClientEvent):
    item_id: _Id


class ItemDelete(ClientEvent):
    item_id: _Id


class ItemTruncate(ClientEvent):
    """The user heard an answer up to `audio_end_ms` milliseconds only."""

    item_id: _Id
    content_index: _Count
    audio_end_ms: _Count


class ResponseCreate(ClientEvent):
    """`response` overrides the session's settings."""

    response: dict[str, Any] | None = None


class ResponseCancel(ClientEvent):
    """Cancels a response, by default the conversation's."""

    response_id: _Id | None = None


_EVENTS: dict[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": AudioCommit,
    "input_audio_buffer.clear": AudioClear,
    "output_audio_buffer.clear": OutputAudioClear,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.delete": ItemDelete,
    "conversation.item.truncate": ItemTruncate,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}
CLIENT_EVENT_TYPES = tuple(_EVENTS)


def parse(text: str) -> ClientEvent:
    """Parses a message: some MiB take tens of milliseconds. Raises ApiError."""
    event = read(text, CLIENT_EVENT_TYPES)
    is_vllms = event["type"] == "session.update" and "model" in event and "session" not in event
    return validated(ModelUpdate if is_vllms else _EVENTS[event["type"]], event)


def read(text: str, known: Sequence[str]) -> dict[str, Any]:
    """The members of an event, whose type is one of `known`. Raises ApiError."""
    if len(text) > MAX_EVENT_CHARACTERS:
        message = f"the event has {len(text)} characters; at most {MAX_EVENT_CHARACTERS} are taken: send it in pieces"
        raise RealtimeError("event_too_large", message)
    check_json(text)
    try:
        event = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise RealtimeError("invalid_json", f"the message is not JSON: {error}") from None
    if not isinstance(event, dict):
        raise RealtimeError("invalid_event", "an event must be a JSON object with a `type`")
    if "type" not in event:
        raise wrong("type", "is missing", "missing_required_parameter", _id_of(event))
    if event["type"] not in known:
        shown = repr(event["type"])[:_SHOWN_CHARACTERS]
        reason = f"{shown} is not known; supported are {', '.join(known)}"
        raise wrong("type", reason, event_id=_id_of(event))
    return event


def _id_of(event: dict[str, Any]) -> str | None:
    event_id = event.get("event_id")
    return event_id if isinstance(event_id, str) and len(event_id) <= _MAX_ID_CHARACTERS else None


def validated(kind: type[Event], event: dict[str, Any]) -> Event:
    """Raises RealtimeError: a member is wrong."""
    try:
        return kind.model_validate(event)
    except ValidationError as error:
        raise from_validation(error, event_id=_id_of(event)) from None


def from_validation(error: ValidationError, within: str = "", event_id: str | None = None) -> RealtimeError:
    """The refusal for pydantic's first error."""
    first = error.errors(include_input=False, include_url=False)[0]
    param = within
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif part not in _TAGS:
            param += f".{part}" if param else part
    kind = first["type"]
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    reason = "is missing" if kind == "missing" else first["msg"].removeprefix("Value error, ")
    reason = "is not known; leave it out" if kind == "extra_forbidden" else reason
    reason = "must be an object" if kind in OBJECT_FAULTS else reason
    reason = reason[0].lower() + reason[1:]
    return RealtimeError(code, f"{param}: {reason}" if param else reason, param or None, event_id)


def new_id(prefix: str) -> str:
    """Returns an id nobody can guess, e.g. "item_5f..."."""
    return f"{prefix}_{secrets.token_hex(12)}"


def new_id_at(prefix: str, node: str) -> str:
    """An id of what a process holds: it says which one, if `node` does."""
    return new_id(f"{prefix}_{node}" if node else prefix)


def server_event(type: str, **members: Any) -> dict[str, Any]:
    return {"type": type, "event_id": new_id("event"), **members}


def error_event(error: ApiError, event_id: str | None = None) -> dict[str, Any]:
    """Has all members of OpenAI's `error`, as clients read them unchecked. `event_id`: of the event at fault."""
    if isinstance(error, RealtimeError):
        event_id = error.event_id or event_id
    body = error.body()["error"]
    return server_event("error", error={**body, "code": error.code or "invalid_value", "event_id": event_id})
