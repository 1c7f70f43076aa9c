"""Members of a Live session, and the realtime session that serves it.

Source: openai 3.57's `types/live/session_config.py`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from gateway.dialects.live.events import unsupported
from gateway.dialects.realtime.conversation.items import Item, message
from gateway.dialects.realtime.events import from_validation
from gateway.dialects.realtime.settings.session_config import ConfigPart, SessionTool, voice_id
from gateway.validation import Listed

PCM_RATES_HZ = (16_000, 24_000)
G711_RATE_HZ = 8_000
# The function by which a thinker hands a task to the client, whose own name for it the model never sees.
DELEGATE = "delegate"
_DELEGATE_TOOL = {
    "type": "function",
    "name": DELEGATE,
    "description": "Hands the user's request to a helper, who has what you lack: tools, data, the power to act. Call "
    "it when an answer needs them. The helper knows the conversation. Its answer comes later; say it then.",
    "parameters": {"type": "object", "properties": {}},
}
_MAX_MESSAGES = 128
_MAX_CHARACTERS = 131_072


class LiveFormat(ConfigPart):
    """Of both directions. PCM: 16 bits, little-endian, mono. G.711: 8 kHz."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: int | None = None

    @model_validator(mode="after")
    def _has_a_rate(self) -> "LiveFormat":
        rates = PCM_RATES_HZ if self.type == "audio/pcm" else (G711_RATE_HZ,)
        if self.rate is not None and self.rate not in rates:
            raise ValueError(f"{self.type} has a rate of {' or '.join(map(str, rates))}, not {self.rate}")
        return self

    @property
    def rate_hz(self) -> int:
        return self.rate or (PCM_RATES_HZ[-1] if self.type == "audio/pcm" else G711_RATE_HZ)


class LiveVoice(ConfigPart):
    voice: Annotated[str, BeforeValidator(voice_id), Field(min_length=1, max_length=256)] | None = None


class LiveAudio(ConfigPart):
    format: LiveFormat = LiveFormat()
    output: LiveVoice = LiveVoice()


class PastText(ConfigPart):
    type: Literal["input_text", "output_text", "text"] = "input_text"
    text: str = Field(max_length=_MAX_CHARACTERS)


class PastMessage(ConfigPart):
    """A message from before the session."""

    role: Literal["developer", "user", "assistant"]
    content: Annotated[Listed[PastText], Field(min_length=1, max_length=1)]

    @property
    def item(self) -> Item:
        kind = "output_text" if self.role == "assistant" else "input_text"
        role = "system" if self.role == "developer" else self.role
        return message(role, [{"type": kind, "text": self.content[0].text}])


class DelegatedModel(ConfigPart):
    """The model that takes tasks: here the one that speaks, whatever its name."""

    model: str | None = None
    instructions: str = Field(default="", max_length=_MAX_CHARACTERS)
    tools: Annotated[Listed[SessionTool], Field(max_length=128, default_factory=list)]
    tool_choice: Any = "auto"
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None


class Delegation(ConfigPart):
    """Who takes tasks. OpenAI's third type, decisions, is not served here."""

    type: Literal["client", "responses"]
    responses: DelegatedModel | None = None

    @model_validator(mode="after")
    def _has_a_model(self) -> "Delegation":
        if (self.type == "responses") != (self.responses is not None):
            raise ValueError("`responses` belongs to the type responses, which needs it")
        return self


def _nothing(value: Any) -> Any:
    if value:
        raise ValueError("is not served here; leave it out")
    return value


class LiveConfig(ConfigPart):
    """`session` of session.start. None of `delegation` is OpenAI's default: the client takes tasks."""

    model: str = Field(min_length=1, max_length=256)
    instructions: Annotated[str, Field(max_length=_MAX_CHARACTERS)] | None = None
    input: Annotated[Listed[PastMessage], Field(max_length=_MAX_MESSAGES)] | None = None
    audio: LiveAudio = LiveAudio()
    delegation: Delegation | None = None
    triggers: Annotated[Any, AfterValidator(_nothing)] = None
    store: Annotated[bool | None, AfterValidator(_nothing)] = None

    @property
    def backend(self) -> DelegatedModel | None:
        """None: the client takes tasks."""
        return None if self.delegation is None else self.delegation.responses

    def realtime(self, semantic: bool, calls_tools: bool) -> dict[str, Any]:
        """Members of the realtime session.

        Args:
            semantic: whether a model judges the ends of turns.
            calls_tools: whether the thinker can hand over tasks; else it does all itself.

        Raises:
            RealtimeError: it cannot, and the client has functions for it.
        """
        backend, kind = self.backend, self.audio.format.type
        patch: dict[str, Any] = {
            "type": "realtime",
            "output_modalities": ["audio"],
            "audio": {
                "input": {
                    "format": {"type": kind},
                    "transcription": {},
                    "turn_detection": {"type": "semantic_vad" if semantic else "server_vad"},
                },
                "output": {"format": {"type": "audio/pcm"}, "voice": self.audio.output.voice},
            },
            "instructions": "\n\n".join(filter(None, (self.instructions, backend and backend.instructions))),
        }
        return patch | self.realtime_tools(calls_tools)

    def realtime_tools(self, calls_tools: bool) -> dict[str, Any]:
        """As `realtime`, of the session's tools."""
        backend = self.backend
        if not calls_tools:
            if backend is not None and backend.tools:
                reason = "this model calls no functions; leave them out"
                raise unsupported("session.delegation.responses.tools", reason)
            return {"tools": [], "tool_choice": "auto", "max_output_tokens": "inf"}
        if backend is None:
            return {"tools": [_DELEGATE_TOOL], "tool_choice": "auto", "max_output_tokens": "inf"}
        tools = [tool.model_dump() for tool in backend.tools]
        return {"tools": tools, "tool_choice": backend.tool_choice, "max_output_tokens": backend.max_output_tokens}

    def updated(self, patch: dict[str, Any]) -> "LiveConfig":
        """Merges a session.update: of a delegation of the same type its members, of other things nothing. Raises
        RealtimeError."""
        for name in patch:
            if name not in ("delegation", "triggers"):
                raise unsupported(f"session.{name}", "cannot change once the session has started")
        merged = self.model_dump() | {name: value for name, value in patch.items() if name != "delegation"}
        if "delegation" in patch:
            merged["delegation"] = _merged(merged["delegation"], patch["delegation"])
        return parse_config(merged)


def _merged(before: dict[str, Any] | None, value: Any) -> Any:
    if not isinstance(value, dict) or before is None or value.get("type") != before["type"]:
        return value
    merged = before | value
    if isinstance(value.get("responses"), dict):
        merged["responses"] = (before.get("responses") or {}) | value["responses"]
    return merged


def parse_config(members: dict[str, Any]) -> LiveConfig:
    """Raises RealtimeError, of a member below `session`."""
    try:
        return LiveConfig.model_validate(members)
    except ValidationError as error:
        raise from_validation(error, "session") from None
