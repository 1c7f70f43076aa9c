"""Members of a session's settings, with defaults and limits.

Members without effect here (tracing, prompts, noise reduction, members of newer models) are kept: an `error` would end
the sessions of clients that send them by default."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from gateway.validation import Listed

PCM_RATE_HZ = 24_000  # of audio/pcm
_MAX_PADDING_MS = 10_000  # kept of the audio before speech
_MAX_SILENCE_MS = 30_000
_MAX_TOOLS = 1024
_MIN_IDLE_MS, _MAX_IDLE_MS = 100, 3_600_000
_SECRET_MEMBERS = ("authorization", "headers")  # of remote tools; the holder of a client secret must not see them

FormatType: TypeAlias = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]


class ConfigPart(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)


def _whole(value: Any) -> Any:
    """Accepts 500.0, as some clients write whole numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Whole = Annotated[int, BeforeValidator(_whole)]


class AudioFormat(ConfigPart):
    """PCM: 16 bits, little-endian, mono, 24 kHz. G.711: 8 kHz."""

    type: FormatType = "audio/pcm"

    @model_validator(mode="before")
    @classmethod
    def _with_rate(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("type", "audio/pcm") != "audio/pcm":
            return value
        if value.get("rate") not in (None, PCM_RATE_HZ):
            raise ValueError(f"audio/pcm has a rate of {PCM_RATE_HZ}, not {str(value['rate'])[:20]}")
        return {"type": "audio/pcm", **value, "rate": PCM_RATE_HZ}


class ServerVad(ConfigPart):
    """A turn ends with `silence_duration_ms` of silence."""

    type: Literal["server_vad"] = "server_vad"
    threshold: float = Field(default=0.5, ge=0, le=1)
    prefix_padding_ms: _Whole = Field(default=300, ge=0, le=_MAX_PADDING_MS)
    silence_duration_ms: _Whole = Field(default=500, ge=0, le=_MAX_SILENCE_MS)
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: _Whole | None = Field(default=None, ge=_MIN_IDLE_MS, le=_MAX_IDLE_MS)


class SemanticVad(ConfigPart):
    """A turn ends when the user seems to have finished."""

    type: Literal["semantic_vad"]
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    create_response: bool = True
    interrupt_response: bool = True


class TranscriptionSettings(ConfigPart):
    """The model is always this server's."""

    model: str | None = None
    language: str | None = None
    languages: Listed[str] | None = None
    prompt: str | None = None
    keywords: Listed[str] | None = None

    @model_serializer(mode="wrap")
    def _as_older_clients_know(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without null for the newer members: pipecat's session does not begin if they are there."""
        newer = ("languages", "keywords")
        return {name: value for name, value in dump(self).items() if value is not None or name not in newer}

    @property
    def only_language(self) -> str | None:
        """The one that is spoken; None: the model finds it."""
        return self.language or (self.languages[0] if self.languages and len(self.languages) == 1 else None)


class AudioInput(ConfigPart):
    format: AudioFormat = AudioFormat.model_validate({})
    transcription: TranscriptionSettings | None = None
    noise_reduction: Any = None
    turn_detection: Annotated[ServerVad | SemanticVad, Field(discriminator="type")] | None = ServerVad()


def voice_id(value: Any) -> Any:
    """Accepts {"id": ...}. Clients parse the echo as a text."""
    return value.get("id") if isinstance(value, dict) else value


class AudioOutput(ConfigPart):
    format: AudioFormat = AudioFormat.model_validate({})
    voice: Annotated[str, BeforeValidator(voice_id), Field(min_length=1, max_length=256)] | None = None
    speed: float = Field(default=1.0, ge=0.25, le=1.5)


class RealtimeAudio(ConfigPart):
    input: AudioInput = Field(default_factory=AudioInput)
    output: AudioOutput = Field(default_factory=AudioOutput)


class TranscriptionAudio(ConfigPart):
    input: AudioInput = AudioInput(transcription=TranscriptionSettings())


class SessionTool(ConfigPart):
    """A function, or a tool of another kind, which is kept and not used."""

    type: str = "function"
    name: str | None = Field(default=None, min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_named(self) -> "SessionTool":
        if self.type == "function" and self.name is None:
            raise ValueError("name is missing")
        return self

    @model_serializer(mode="wrap")
    def _what_is_set(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None and name not in _SECRET_MEMBERS}


def _modalities(value: list[str]) -> list[str]:
    if value not in (["audio"], ["text"]):
        raise ValueError('must be ["audio"], which comes with its transcript, or ["text"]')
    return value


def _max_output_tokens(value: Any) -> Any:
    number = _whole(value)
    if number != "inf" and (isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 2**31):
        raise ValueError('must be a number from 1, or "inf"')
    return number


def _tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        if value["type"] != "function":
            return value
        named = value if "name" in value else value.get("function")  # the latter: as in chats
        name = named.get("name") if isinstance(named, dict) else None
        if isinstance(name, str) and name:
            return {"type": "function", "name": name}
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "name": ...}')


def _truncation(value: Any) -> Any:
    if value in ("auto", "disabled"):
        return value
    ratio = value.get("retention_ratio") if isinstance(value, dict) else None
    if isinstance(ratio, int | float) and not isinstance(ratio, bool) and 0 <= ratio <= 1:
        return {**value, "type": "retention_ratio"}
    raise ValueError('must be "auto", "disabled" or {"type": "retention_ratio", "retention_ratio": 0 to 1}')


class RealtimeConfig(ConfigPart):
    type: Literal["realtime"] = "realtime"
    output_modalities: Annotated[Listed[str], AfterValidator(_modalities)] = ["audio"]
    instructions: str = ""
    audio: RealtimeAudio = Field(default_factory=RealtimeAudio)
    include: Listed[str] | None = None
    max_output_tokens: Annotated[Any, AfterValidator(_max_output_tokens)] = "inf"
    tools: Annotated[Listed[SessionTool], Field(max_length=_MAX_TOOLS)] = []
    tool_choice: Annotated[Any, AfterValidator(_tool_choice)] = "auto"
    truncation: Annotated[Any, AfterValidator(_truncation)] = "auto"
    tracing: Any = None
    prompt: Any = None

    @model_validator(mode="after")
    def _tools_differ(self) -> "RealtimeConfig":
        names = [tool.name for tool in self.tools if tool.type == "function"]
        if len(set(names)) < len(names):
            raise ValueError("two of the tools have the same name")
        return self


class TranscriptionConfig(ConfigPart):
    type: Literal["transcription"]
    audio: TranscriptionAudio = Field(default_factory=TranscriptionAudio)
    include: Listed[str] | None = None
