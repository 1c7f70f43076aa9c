"""The settings of one session of `/v1/realtime`: what the client set, merged and checked, and what that means here."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from gateway.answers.tools.schema import IMAGE_TOOL
from gateway.dialects.realtime.events import RealtimeError, from_validation, new_id
from gateway.dialects.realtime.settings.session_config import (
    TAGS,
    FormatType,
    RealtimeConfig,
    SemanticVad,
    ServerVad,
    Tool,
    Transcription,
    TranscriptionConfig,
)
from gateway.settings import MIB
from services.common.rpc.messages import spelled

SessionType: TypeAlias = Literal["realtime", "transcription"]
# OpenAI's voices, in the order in which they are dealt out to the model's voices. New ones go to the end.
OPENAI_VOICES = (
    *("alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer", "verse"),
    *("marin", "cedar"),
)
_MAX_CONFIG_CHARACTERS = MIB  # as JSON: unknown members are kept, but not without end
_CONFIGS = {"realtime": RealtimeConfig, "transcription": TranscriptionConfig}
_OBJECTS = {"realtime": "realtime.session", "transcription": "realtime.transcription_session"}
_OURS = ("id", "object", "type", "model", "expires_at")  # what a client says of these does not count
# Members whose own members are merged; others are replaced as a whole.
_MERGED = {("audio",), ("audio", "input"), ("audio", "output")}
_MERGED |= {("audio", "input", name) for name in ("transcription", "turn_detection")}
_TURN_DETECTION = ("audio", "input", "turn_detection")
# What a single response may have otherwise than its session.
_OF_RESPONSES = ("output_modalities", "instructions", "tools", "tool_choice", "max_output_tokens")


@dataclass(frozen=True)
class RetentionRatio:
    """How a conversation that is too long is cut: to `ratio` of the context, or of `post_instructions` tokens."""

    ratio: float
    post_instructions: int | None


@dataclass(frozen=True)
class Session:
    """Settings at one moment.

    Attributes:
        id: of the session, "sess_...".
        model: name of the served model, whatever the client calls it.
        voices: the model's, the first its default; empty if it has none, or they are not known yet.
        expires_at: Unix time in seconds at which the session ends, if it does.
        config: what is set.
        speaks: whether the model has speech; without, answers are text.
        lora: adapter of the model that answers; "": none.
        draws: whether image_generation runs for it.
    """

    id: str
    model: str
    voices: tuple[str, ...]
    expires_at: int | None
    config: RealtimeConfig | TranscriptionConfig
    speaks: bool = True
    lora: str = ""
    draws: bool = False

    @classmethod
    def new(
        cls,
        model: str,
        voices: Sequence[str] = (),
        type: SessionType = "realtime",
        expires_at: int | None = None,
        speaks: bool = True,
        lora: str = "",
        draws: bool = False,
    ) -> "Session":
        """One as it is before its client says anything."""
        config = _CONFIGS[type].model_validate({"type": type})
        session = cls(new_id("sess"), model, tuple(voices), expires_at, config, speaks, lora, draws)
        return session if speaks or type != "realtime" else session.updated({"output_modalities": None})

    def updated(self, patch: dict[str, Any], within: str = "session") -> "Session":
        """The session with the members of `patch`. Null takes a member back to its default, and turn detection off.

        A patch of the other type makes it a session of that type, with the same audio input.

        Args:
            patch: as in session.update.
            within: what errors call it.

        Raises:
            RealtimeError: names the member at fault. Its event_id is for the caller to set.
        """
        type = patch.get("type") or self.type
        if not isinstance(type, str) or type not in _CONFIGS:
            message = f'{within}.type: must be "realtime" or "transcription"'
            raise RealtimeError("invalid_value", message, f"{within}.type")
        base = self.config.model_dump()
        if type != self.type:
            base = _of_other_type(base, type)
        merged = _merged(base, {name: value for name, value in patch.items() if name not in _OURS})
        merged["type"] = type
        if type == "realtime" and not self.speaks:
            _refuse_speech(merged, within)
        try:
            config = _CONFIGS[type].model_validate(merged)
        except ValidationError as error:
            raise from_validation(error, within, tags=TAGS) from None
        if len(json.dumps(merged, ensure_ascii=False)) > _MAX_CONFIG_CHARACTERS:
            message = f"{within}: has more than {_MAX_CONFIG_CHARACTERS} characters as JSON; shorten its members"
            raise RealtimeError("session_too_large", message, within)
        changed = replace(self, config=config)
        changed._check_voice(within)
        return changed

    def for_response(self, response: dict[str, Any] | None) -> "Session":
        """The settings of one response, from what response.create says of it. Members that are not settings
        (conversation, input, metadata) are the caller's. Raises RealtimeError: names the member, "response...."."""
        response = response or {}
        patch = {name: response[name] for name in _OF_RESPONSES if name in response}
        audio = response.get("audio")
        if audio is not None and not isinstance(audio, dict):
            raise RealtimeError("invalid_type", "response.audio: must be an object", "response.audio")
        if audio and "output" in audio:
            patch["audio"] = {"output": audio["output"]}
        return self.updated(patch, "response") if patch else self

    def public(self) -> dict[str, Any]:
        """All of it, as session.created and session.updated show it."""
        shown = self.config.model_dump()
        if isinstance(self.config, RealtimeConfig):
            shown["model"] = self.lora or self.model
            shown["audio"]["output"]["voice"] = self.config.audio.output.voice or next(iter(self.voices), None)
        return {"id": self.id, "object": _OBJECTS[self.type], "expires_at": self.expires_at, **shown}

    @property
    def type(self) -> SessionType:
        """Whether it answers, or only writes down."""
        return self.config.type

    @property
    def modalities(self) -> tuple[Literal["audio", "text"]]:
        """What answers are made of; audio comes with its transcript."""
        is_text = isinstance(self.config, RealtimeConfig) and self.config.output_modalities == ["text"]
        return ("text",) if is_text else ("audio",)

    @property
    def instructions(self) -> str:
        """The system message; "" for none."""
        return self._answering.instructions

    @property
    def input_format(self) -> FormatType:
        """Of the user's audio."""
        return self.config.audio.input.format.type

    @property
    def output_format(self) -> FormatType:
        """Of the audio of answers."""
        return self._answering.audio.output.format.type

    @property
    def transcription(self) -> Transcription | None:
        """How the user's audio is written down, if it is: in a transcription session always."""
        asked = self.config.audio.input.transcription
        return asked or (Transcription() if self.type == "transcription" else None)

    @property
    def turn_detection(self) -> ServerVad | SemanticVad | None:
        """Who ends turns; None: the client. A transcription session's turns neither make nor interrupt answers."""
        detection = self.config.audio.input.turn_detection
        if detection is None or self.type == "realtime":
            return detection
        return detection.model_copy(update={"create_response": False, "interrupt_response": False})

    @property
    def voice(self) -> str | None:
        """The voice as the model spells it, also for one of OpenAI's; None for the model's default."""
        return self._model_voice(self._answering.audio.output.voice)

    @property
    def speed(self) -> float:
        """Of speech; 1 is the model's own."""
        return self._answering.audio.output.speed

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The functions that the model may call."""
        return tuple(tool for tool in self._answering.tools if tool.type == "function")

    @property
    def all_tools(self) -> Sequence[Tool]:
        """Those of other kinds, too."""
        return self._answering.tools

    @property
    def tool_choice(self) -> str:
        """ "none", "auto" or "required"; for a function that must be called "function"."""
        choice = self._answering.tool_choice
        if isinstance(choice, dict):  # tools of other kinds are not used
            return "function" if self.tool_choice_name is not None else "auto"
        return choice

    @property
    def tool_choice_name(self) -> str | None:
        """The function that must be called."""
        choice = self._answering.tool_choice
        if isinstance(choice, dict) and choice["type"] == IMAGE_TOOL:
            return IMAGE_TOOL if self.draws else None
        return choice["name"] if isinstance(choice, dict) and choice["type"] == "function" else None

    @property
    def max_output_tokens(self) -> int | None:
        """Most tokens of an answer; None: no limit but the model's."""
        most = self._answering.max_output_tokens
        return None if most == "inf" else most

    @property
    def truncation(self) -> Literal["auto", "disabled"] | RetentionRatio:
        """What happens to a conversation that is longer than the context."""
        asked = self._answering.truncation
        if not isinstance(asked, dict):
            return asked
        limits = asked.get("token_limits")
        most = limits.get("post_instructions") if isinstance(limits, dict) else None
        return RetentionRatio(asked["retention_ratio"], most if isinstance(most, int) else None)

    @property
    def _answering(self) -> RealtimeConfig:
        """What is set of answers; in a session without them the defaults."""
        return self.config if isinstance(self.config, RealtimeConfig) else RealtimeConfig()

    def _model_voice(self, asked: str | None) -> str | None:
        if asked is None or not self.voices:
            return asked
        own = spelled(asked, self.voices)
        if own is None and (name := asked.lower()) in OPENAI_VOICES:
            return self.voices[OPENAI_VOICES.index(name) % len(self.voices)]
        return own or asked

    def _check_voice(self, within: str) -> None:
        voice = self.voice
        if voice is None or not self.voices or voice in self.voices:
            return
        param = f"{within}.audio.output.voice"
        message = f"{param}: there is no voice {voice!r}; use one of {', '.join(self.voices)}, or a name of OpenAI's"
        raise RealtimeError("invalid_value", message, param)


def _refuse_speech(merged: dict[str, Any], within: str) -> None:
    """Has the answers be text where nothing else is said. Raises RealtimeError: speech is asked for."""
    if merged.setdefault("output_modalities", ["text"]) == ["audio"]:
        param = f"{within}.output_modalities"
        raise RealtimeError("invalid_value", f'{param}: this model has no speech: use ["text"]', param)


def _of_other_type(base: dict[str, Any], type: str) -> dict[str, Any]:
    """What a session that becomes one of another type keeps."""
    kept = dict(base["audio"]["input"])
    if type == "transcription" and kept["transcription"] is None:
        del kept["transcription"]
    return {"audio": {"input": kept}, "include": base["include"]}


def _merged(base: dict[str, Any], patch: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """`base` with the members of `patch`, without those that are null there."""
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
