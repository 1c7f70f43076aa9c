"""A session's settings."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from gateway.answers.names import own_voice
from gateway.dialects.realtime.events import from_validation, new_id, wrong
from gateway.dialects.realtime.settings.session_config import (
    FormatType,
    RealtimeConfig,
    SemanticVad,
    ServerVad,
    SessionTool,
    TranscriptionConfig,
    TranscriptionSettings,
)
from gateway.settings import MIB

SessionType: TypeAlias = Literal["realtime", "transcription"]
_MAX_CONFIG_CHARACTERS = MIB  # as JSON; bounds the unknown members
_CONFIGS = {"realtime": RealtimeConfig, "transcription": TranscriptionConfig}
_OBJECTS = {"realtime": "realtime.session", "transcription": "realtime.transcription_session"}
_OURS = ("id", "object", "type", "model", "expires_at")  # a client cannot set these
# Members whose own members are merged; others are replaced as a whole.
_MERGED = {("audio",), ("audio", "input"), ("audio", "output")}
_MERGED |= {("audio", "input", name) for name in ("transcription", "turn_detection")}
_TURN_DETECTION = ("audio", "input", "turn_detection")
# Settings that a single response may override.
_OF_RESPONSES = ("output_modalities", "instructions", "tools", "tool_choice", "max_output_tokens")


@dataclass(frozen=True)
class RetentionRatio:
    """Cuts a prompt that exceeds the context, or `post_instructions` tokens, to `ratio` of its items."""

    ratio: float
    post_instructions: int | None


@dataclass(frozen=True)
class Session:
    """The settings at one moment.

    Attributes:
        model: the served model's own name.
        voices: the model's, the default first; empty: there are none, or they are unknown yet.
        expires_at: Unix seconds.
        speaks: whether the model has speech.
        lora: adapter that answers; "": none.
        hosted_tools: names of the tools that run here.
    """

    id: str
    model: str
    voices: tuple[str, ...]
    config: RealtimeConfig | TranscriptionConfig
    expires_at: int | None = None
    speaks: bool = True
    lora: str = ""
    hosted_tools: Collection[str] = ()

    @classmethod
    def new(cls, model: str, voices: Sequence[str] = (), type: SessionType = "realtime", **members: Any) -> "Session":
        """A session by its defaults; `members` are further attributes."""
        config = _CONFIGS[type].model_validate({"type": type})
        session = cls(new_id("sess"), model, tuple(voices), config, **members)
        return session if session.speaks or type != "realtime" else session.updated({"output_modalities": None})

    def updated(self, patch: dict[str, Any], within: str = "session") -> "Session":
        """Merges a session.update. Null resets a member to its default, and turns turn detection off. A patch of the
        other type keeps the audio input.

        Raises:
            RealtimeError: a member, below `within`, is wrong.
        """
        type = patch.get("type") or self.type
        if not isinstance(type, str) or type not in _CONFIGS:
            raise wrong(f"{within}.type", 'must be "realtime" or "transcription"')
        base = self.config.model_dump()
        if type != self.type:
            base = _of_other_type(base, type)
        merged = _merged(base, {name: value for name, value in patch.items() if name not in _OURS})
        merged["type"] = type
        if type == "realtime" and not self.speaks and merged.setdefault("output_modalities", ["text"]) == ["audio"]:
            raise wrong(f"{within}.output_modalities", 'this model has no speech: use ["text"]')
        if len(json.dumps(merged, ensure_ascii=False)) > _MAX_CONFIG_CHARACTERS:
            reason = f"has more than {_MAX_CONFIG_CHARACTERS} characters as JSON; shorten its members"
            raise wrong(within, reason, "session_too_large")
        try:
            config = _CONFIGS[type].model_validate(merged)
        except ValidationError as error:
            raise from_validation(error, within) from None
        changed = replace(self, config=config)
        voice = changed.voice
        if voice is not None and self.voices and voice not in self.voices:
            reason = f"there is no voice {voice!r}; use one of {', '.join(self.voices)}, or a name of OpenAI's"
            raise wrong(f"{within}.audio.output.voice", reason)
        return changed

    def for_response(self, response: dict[str, Any] | None) -> "Session":
        """Merges the settings of a response.create. Raises RealtimeError."""
        response = response or {}
        patch = {name: response[name] for name in _OF_RESPONSES if name in response}
        audio = response.get("audio")
        if audio is not None and not isinstance(audio, dict):
            raise wrong("response.audio", "must be an object", "invalid_type")
        if audio and "output" in audio:
            patch["audio"] = {"output": audio["output"]}
        return self.updated(patch, "response") if patch else self

    def public(self) -> dict[str, Any]:
        """The `session` of session.created and session.updated."""
        shown = self.config.model_dump()
        if isinstance(self.config, RealtimeConfig):
            shown["model"] = self.lora or self.model
            shown["audio"]["output"]["voice"] = self.config.audio.output.voice or next(iter(self.voices), None)
        return {"id": self.id, "object": _OBJECTS[self.type], "expires_at": self.expires_at, **shown}

    @property
    def type(self) -> SessionType:
        return self.config.type

    @property
    def modalities(self) -> tuple[Literal["audio", "text"]]:
        is_text = isinstance(self.config, RealtimeConfig) and self.config.output_modalities == ["text"]
        return ("text",) if is_text else ("audio",)

    @property
    def input_format(self) -> FormatType:
        return self.config.audio.input.format.type

    @property
    def transcription(self) -> TranscriptionSettings | None:
        """None: the user's sound is not transcribed."""
        settings = self.config.audio.input.transcription
        return settings or (TranscriptionSettings() if self.type == "transcription" else None)

    @property
    def turn_detection(self) -> ServerVad | SemanticVad | None:
        """None: the client ends turns. A transcription session has no answers to start or interrupt."""
        detection = self.config.audio.input.turn_detection
        if detection is None or self.type == "realtime":
            return detection
        return detection.model_copy(update={"create_response": False, "interrupt_response": False})

    @property
    def voice(self) -> str | None:
        """The model's, also for one of OpenAI's; None: the default."""
        requested = self.response_config.audio.output.voice
        if requested is None or not self.voices:
            return requested
        return own_voice(requested, self.voices) or requested

    @property
    def tools(self) -> tuple[SessionTool, ...]:
        return tuple(tool for tool in self.response_config.tools if tool.type == "function")

    @property
    def all_tools(self) -> Sequence[SessionTool]:
        return self.response_config.tools

    @property
    def tool_choice(self) -> tuple[str, str | None]:
        """("none", "auto" or "required", None), or ("function", its name)."""
        choice = self.response_config.tool_choice
        if not isinstance(choice, dict):
            return choice, None
        name = choice["name"] if choice["type"] == "function" else None
        if choice["type"] in self.hosted_tools:
            name = choice["type"]
        return ("auto", None) if name is None else ("function", name)  # tools of other kinds are not used

    @property
    def max_output_tokens(self) -> int | None:
        """None: no limit but the model's."""
        most = self.response_config.max_output_tokens
        return None if most == "inf" else most

    @property
    def truncation(self) -> Literal["auto", "disabled"] | RetentionRatio:
        truncation = self.response_config.truncation
        if not isinstance(truncation, dict):
            return truncation
        limits = truncation.get("token_limits")
        most = limits.get("post_instructions") if isinstance(limits, dict) else None
        return RetentionRatio(truncation["retention_ratio"], most if isinstance(most, int) else None)

    @property
    def response_config(self) -> RealtimeConfig:
        """The settings of responses; the defaults if the session has none."""
        return self.config if isinstance(self.config, RealtimeConfig) else RealtimeConfig()


def _of_other_type(base: dict[str, Any], type: str) -> dict[str, Any]:
    kept = dict(base["audio"]["input"])
    if type == "transcription" and kept["transcription"] is None:
        del kept["transcription"]
    return {"audio": {"input": kept}, "include": base["include"]}


def _merged(base: dict[str, Any], patch: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """`base` with the members of `patch`, and without those that are null there."""
    merged = dict(base)
    for name, value in patch.items():
        at = (*path, name)
        if at == _TURN_DETECTION and value in (None, False):  # some clients say false
            merged[name] = None
        elif value is None:
            merged.pop(name, None)
        elif at in _MERGED and isinstance(value, dict):
            before = merged.get(name) or {}
            if at == _TURN_DETECTION:
                value = {"type": before.get("type", "server_vad"), **value}
                before = before if before.get("type") == value["type"] else {}
            merged[name] = _merged(before, value, at)
        else:
            merged[name] = value
    return merged
