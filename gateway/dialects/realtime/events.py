"""Parses the client's events and makes the server's.

Unknown members are kept, never refused: clients send what newer models of OpenAI take.
"""

import asyncio
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from gateway.errors import ApiError
from gateway.settings import MIB

Result = TypeVar("Result")
MAX_AUDIO_CHARACTERS = 15 * MIB  # base64 of one append, as at OpenAI
MAX_EVENT_CHARACTERS = 16 * MIB
_LONG_CHARACTERS = MIB // 4
_MAX_ID_CHARACTERS = 512
_SHOWN_CHARACTERS = 64  # of a client's value in an error


@dataclass(eq=False)
class RealtimeError(Exception):
    """A refusal, sent to the client; the session goes on.

    Attributes:
        param: member at fault, e.g. "session.audio.output.speed".
        event_id: names the client's event at fault.
        type: "server_error" where the client is not at fault.
    """

    code: str
    message: str
    param: str | None = None
    event_id: str | None = None
    type: str = "invalid_request_error"

    def __post_init__(self) -> None:
        super().__init__(self.message)


def from_api(error: ApiError) -> RealtimeError:
    return RealtimeError(error.code or "invalid_value", error.message, error.param, type=error.kind)


def to_api(error: RealtimeError) -> ApiError:
    return ApiError(400, error.message, error.param, error.code)


async def in_thread_if_long(characters: int, work: Callable[[], Result]) -> Result:
    """Runs `work`, in a thread if it would block the event loop."""
    return await asyncio.to_thread(work) if characters > _LONG_CHARACTERS else work()


class _Event(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    event_id: str | None = Field(default=None, max_length=_MAX_ID_CHARACTERS)


_Id = Annotated[str, Field(min_length=1, max_length=_MAX_ID_CHARACTERS)]
_Count = Annotated[int, Field(ge=0, lt=2**53)]


class SessionUpdate(_Event):
    type: Literal["session.update"]
    session: dict[str, Any]


class ModelUpdate(_Event):
    """session.update of vLLM's dialect."""

    type: Literal["session.update"]
    model: str


class AudioAppend(_Event):
    type: Literal["input_audio_buffer.append"]
    audio: str = Field(max_length=MAX_AUDIO_CHARACTERS)


class AudioCommit(_Event):
    type: Literal["input_audio_buffer.commit"]


class AudioClear(_Event):
    type: Literal["input_audio_buffer.clear"]


class OutputAudioClear(_Event):
    """Sent with WebRTC and SIP, where the server plays the audio."""

    type: Literal["output_audio_buffer.clear"]


class ItemCreate(_Event):
    """Inserts an item after `previous_item_id`: first for "root", last for None."""

    type: Literal["conversation.item.create"]
    item: dict[str, Any]
    previous_item_id: _Id | None = None


class ItemRetrieve(_Event):
    type: Literal["conversation.item.retrieve"]
    item_id: _Id


class ItemDelete(_Event):
    type: Literal["conversation.item.delete"]
    item_id: _Id


class ItemTruncate(_Event):
    """The user heard an answer up to `audio_end_ms` milliseconds only."""

    type: Literal["conversation.item.truncate"]
    item_id: _Id
    content_index: _Count
    audio_end_ms: _Count


class ResponseCreate(_Event):
    """Asks for a response; `response` overrides the session's settings."""

    type: Literal["response.create"]
    response: dict[str, Any] | None = None


class ResponseCancel(_Event):
    """Cancels a response, by default the conversation's."""

    type: Literal["response.cancel"]
    response_id: _Id | None = None


OpenAiEvent: TypeAlias = (
    SessionUpdate
    | AudioAppend
    | AudioCommit
    | AudioClear
    | OutputAudioClear
    | ItemCreate
    | ItemRetrieve
    | ItemDelete
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
)
ClientEvent: TypeAlias = OpenAiEvent | ModelUpdate
_CLIENT_EVENTS: TypeAdapter[OpenAiEvent] = TypeAdapter(Annotated[OpenAiEvent, Field(discriminator="type")])
CLIENT_EVENT_TYPES = tuple(event.model_fields["type"].annotation.__args__[0] for event in OpenAiEvent.__args__)


def parse(text: str) -> ClientEvent:
    """Parses a message, for tens of milliseconds if it has some MiB. Raises RealtimeError."""
    if len(text) > MAX_EVENT_CHARACTERS:
        message = f"the event has {len(text)} characters; at most {MAX_EVENT_CHARACTERS} are taken: send it in pieces"
        raise RealtimeError("event_too_large", message)
    try:
        event = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise RealtimeError("invalid_json", f"the message is not JSON: {error}") from None
    if not isinstance(event, dict):
        raise RealtimeError("invalid_event", "an event must be a JSON object with a `type`")
    event_id = event.get("event_id")
    if not isinstance(event_id, str) or len(event_id) > _MAX_ID_CHARACTERS:
        event_id = None
    _check_type(event, event_id)
    is_vllms = event["type"] == "session.update" and "model" in event and "session" not in event
    try:
        return ModelUpdate.model_validate(event) if is_vllms else _CLIENT_EVENTS.validate_python(event)
    except ValidationError as error:
        raise from_validation(error, event_id=event_id, tags=CLIENT_EVENT_TYPES) from None


def _check_type(event: dict[str, Any], event_id: str | None) -> None:
    if "type" not in event:
        raise RealtimeError("missing_required_parameter", "type: is missing", "type", event_id)
    if event["type"] not in CLIENT_EVENT_TYPES:
        shown = repr(event["type"])[:_SHOWN_CHARACTERS]
        message = f"type: {shown} is not known; supported are {', '.join(CLIENT_EVENT_TYPES)}"
        raise RealtimeError("invalid_value", message, "type", event_id)


def from_validation(
    error: ValidationError, within: str = "", event_id: str | None = None, tags: Collection[str] = ()
) -> RealtimeError:
    """Makes a refusal of pydantic's first error. `tags`: of unions, which pydantic puts into the path."""
    first = error.errors(include_input=False, include_url=False)[0]
    param = within
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif part not in tags:
            param += f".{part}" if param else part
    return RealtimeError(
        _code(first), f"{param}: {_reason(first)}" if param else _reason(first), param or None, event_id
    )


def _code(error: ErrorDetails) -> str:
    kind = error["type"]
    if kind == "missing":
        return "missing_required_parameter"
    if kind == "string_too_long":
        return "string_above_max_length"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"


def _reason(error: ErrorDetails) -> str:
    if error["type"] == "missing":
        return "is missing"
    reason = error["msg"].removeprefix("Value error, ")
    return reason[0].lower() + reason[1:]


def new_id(prefix: str) -> str:
    """Returns an id nobody can guess, e.g. "item_5f..."."""
    return f"{prefix}_{secrets.token_hex(12)}"


def server_event(type: str, **members: Any) -> dict[str, Any]:
    return {"type": type, "event_id": new_id("event"), **members}


def error_event(error: RealtimeError) -> dict[str, Any]:
    """Has all members of OpenAI's `error`, as clients read them unchecked."""
    body = {"type": error.type, "code": error.code, "message": error.message, "param": error.param}
    return server_event("error", error={**body, "event_id": error.event_id})
