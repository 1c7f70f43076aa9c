"""Events of the Live API: parses the client's and makes the server's."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from gateway.dialects.realtime.events import (
    MAX_AUDIO_CHARACTERS,
    ClientEvent,
    RealtimeError,
    read,
    server_event,
    validated,
)
from gateway.errors import ApiError

_MAX_APPEND_CHARACTERS = 8000  # clients cut at 450 tokens; OpenAI takes 500


class LiveEvent(ClientEvent):
    model_config = ConfigDict(extra="forbid", strict=True)


class LiveStart(LiveEvent):
    session: dict[str, Any]


class LiveUpdate(LiveEvent):
    session: dict[str, Any]


class LiveAudioAppend(LiveEvent):
    audio: str = Field(max_length=MAX_AUDIO_CHARACTERS)


class LiveMute(LiveEvent):
    """What is heard from now on is silence."""


class LiveUnmute(LiveEvent):
    """What is sent is heard again."""


class FixturePlay(LiveEvent):
    """A sound of the client's, which the server plays: PCM16, 24 kHz."""

    audio: str = Field(max_length=MAX_AUDIO_CHARACTERS)


class LiveAppend(LiveEvent):
    """Text for the model. `delegation_id`: of the task that it belongs to; None: to none."""

    content: Annotated[str, Field(min_length=1, max_length=_MAX_APPEND_CHARACTERS)]
    delegation_id: str | None = None


class InstructionsAppend(LiveAppend):
    """A rule from now on."""


class ThinkingAppend(LiveAppend):
    """Something to know, and not to say."""


class CommentaryAppend(LiveAppend):
    """Something to say now."""


class DelegatedItem(LiveEvent):
    """An item for the model that a task was delegated to."""

    item: dict[str, Any]


class DelegatedResponse(LiveEvent):
    """The model that a task was delegated to goes on."""


class LiveClose(LiveEvent):
    """Ends the session."""


_EVENTS: dict[str, type[LiveEvent]] = {
    "session.start": LiveStart,
    "session.update": LiveUpdate,
    "session.input_audio.append": LiveAudioAppend,
    "session.input_audio.mute": LiveMute,
    "session.input_audio.unmute": LiveUnmute,
    "session.output_audio.fixture.play": FixturePlay,
    "session.instructions.append": InstructionsAppend,
    "session.thinking.append": ThinkingAppend,
    "session.commentary.append": CommentaryAppend,
    "response.item.create": DelegatedItem,
    "response.create": DelegatedResponse,
    "session.close": LiveClose,
}
LIVE_EVENT_TYPES = tuple(_EVENTS)
_OF_FULL_DUPLEX = ("decision.create", "decision.item.create", "decision.item.delete", "transport.dtmf.send")


def parse(text: str) -> LiveEvent:
    """Parses a message. Raises ApiError."""
    event = read(text, (*_EVENTS, *_OF_FULL_DUPLEX))
    if event["type"] in _OF_FULL_DUPLEX:
        refusal = unsupported("type", f"{event['type']} is not served here")
        refusal.event_id = validated(ClientEvent, event).event_id
        raise refusal
    return validated(_EVENTS[event["type"]], event)


def unsupported(param: str, reason: str) -> RealtimeError:
    """The refusal of what OpenAI's models do and a server of turns does not."""
    return RealtimeError("unsupported_parameter", f"{param}: {reason}", param)


def acknowledged(kind: str, event: ClientEvent, **members: Any) -> dict[str, Any]:
    """The event of the server that answers `event`."""
    names = {} if event.event_id is None else {"client_event_id": event.event_id}
    return server_event(kind, **members, **names)


def error_event(error: ApiError, event_id: str | None = None) -> dict[str, Any]:
    """`event_id`: of the client's event at fault."""
    if isinstance(error, RealtimeError):
        event_id = error.event_id or event_id
    body = error.body()["error"]
    members = {name: body.get(name) for name in ("type", "message", "param")}
    return server_event("error", error={**members, "code": error.code or "invalid_value", "client_event_id": event_id})
