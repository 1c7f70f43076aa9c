"""Answers to prompts."""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gateway.answers.answer import WholeAnswer, logprobs, usage
from gateway.answers.tools.events import ToolResult
from gateway.answers.turn import AnswerEvent
from gateway.media.encode import BYTES_PER_SAMPLE, encode_audio
from gateway.pipeline import events
from quartet.errors import Error, refused

_PCM16_SCALE = 32768.0
_FORMATS = ("wav", "flac", "mp3", "opus", "aac")


@dataclass(frozen=True, eq=False)
class Audio:
    """Mono audio; `samples` are (n,) int16."""

    samples: np.ndarray
    rate_hz: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate_hz

    @property
    def float32(self) -> np.ndarray:
        """(n,) float32, -1 to 1."""
        return self.samples.astype(np.float32) / _PCM16_SCALE

    def save(self, path: str | Path) -> None:
        """Writes a .wav, .flac, .mp3, .opus or .aac file.

        Raises:
            Error: the name ends otherwise.
            OSError: the file cannot be written.
        """
        kind = Path(path).suffix.removeprefix(".").lower()
        if kind not in _FORMATS:
            raise refused("path", f"{str(path)!r} must end with one of {', '.join(f'.{known}' for known in _FORMATS)}")
        Path(path).write_bytes(self.encoded(kind))

    def encoded(self, kind: str) -> bytes:
        """A file: "wav", "flac", "mp3", "opus" or "aac"."""
        return encode_audio(self.samples.astype("<i2").tobytes(), self.rate_hz, kind)

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.encoded("flac")).decode()
        return f'<audio controls src="data:audio/flac;base64,{data}"></audio>'

    def __repr__(self) -> str:
        return f"Audio({self.seconds:.2f} s at {self.rate_hz} Hz)"


@dataclass(frozen=True)
class TextDelta:
    """More text of an answer; `token_ids` are of text and reasoning."""

    text: str
    token_ids: list[int]
    reasoning: str = ""


@dataclass(frozen=True, eq=False)
class AudioDelta:
    """More audio of an answer."""

    audio: Audio


@dataclass(frozen=True, eq=False)
class ImageDelta:
    """An image that was made in the course of an answer. `prompt`: the one that the model wrote."""

    image: Image.Image
    prompt: str | None


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to one prompt. After a failure only `error` is set.

    Attributes:
        text: of a model that only speaks, the spoken words.
        audio: the speech, if requested.
        images: those that were made, in their order.
        image_errors: why the others were not, in OpenAI's form.
        token_ids: of reasoning and text.
        finish_reason: "stop", "length" or "tool_calls".
        usage: token counts, as in an HTTP answer.
        tool_calls: in OpenAI's form.
        logprobs: of each token, in OpenAI's form, if requested.
        timings: milliseconds by stage and phase.
        error: why a prompt of a list failed.
    """

    text: str = ""
    audio: Audio | None = None
    images: list[Image.Image] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list, repr=False)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict, repr=False)
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = field(default=None, repr=False)
    timings: dict[str, Any] = field(default_factory=dict, repr=False)
    image_errors: list[dict[str, Any]] = field(default_factory=list)
    error: Error | None = None
    _image_parts: list[dict[str, Any]] = field(default_factory=list, repr=False)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message, for the next turn of a chat."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        images = {"images": self._image_parts} if self._image_parts else {}
        return {"role": "assistant", "content": self.text or None, **thought, **images, **calls}


Event = TextDelta | AudioDelta | ImageDelta | Answer


@dataclass
class AnswerBuilder(WholeAnswer):
    """Builds an answer of events. `rate_hz` is its audio's."""

    rate_hz: int = 0
    images: list[Image.Image] = field(default_factory=list)

    def deltas(self, event: AnswerEvent) -> Iterator[Event]:
        """The caller's events for a taken one."""
        match event:
            case events.PromptRead(text=text) if text:
                yield TextDelta(text, [])
            case events.TextDelta(delta) if delta.text or delta.reasoning or delta.token_ids:
                yield TextDelta(delta.text, list(delta.token_ids), delta.reasoning)
            case events.AudioDelta(pcm16):
                yield AudioDelta(_audio(pcm16, self.rate_hz))
            case ToolResult(item, "image"):
                self.images.append(image_of(item["result"]))
                yield ImageDelta(self.images[-1], item.get("revised_prompt"))

    def answer(self, wants_logprobs: bool) -> Answer:
        return Answer(
            text=self.text,
            audio=_audio(bytes(self.samples), self.sample_rate_hz) if self.samples else None,
            images=self.images,
            image_errors=self.made["image_errors"],
            _image_parts=self.made["images"],
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            usage=usage([self]),
            reasoning=self.reasoning,
            tool_calls=[call for _, call in sorted(self.calls.items())],
            logprobs=logprobs(self.tokens) if wants_logprobs else None,
            timings=self.quartet()["timings"],
        )


def image_of(file_base64: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(file_base64))).convert("RGB")


def _audio(pcm16: bytes, rate_hz: int) -> Audio:
    assert len(pcm16) % BYTES_PER_SAMPLE == 0
    return Audio(np.frombuffer(pcm16, "<i2").astype(np.int16), rate_hz)
