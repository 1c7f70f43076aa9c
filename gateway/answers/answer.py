"""What an answer adds up to: its text, audio, images, tokens and times."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.answers.tools.events import ToolFailure, ToolImage
from gateway.answers.turn import AnswerEvent, NextTurn
from gateway.media.encode import BYTES_PER_SAMPLE
from gateway.pipeline.events import AudioDelta, CodesDelta, Finished, PromptRead, PromptTokens, TextDelta
from quartet.v1 import talker_pb2, thinker_pb2, timings_pb2

FINISH_REASON = {
    thinker_pb2.FINISH_REASON_STOP: "stop",
    thinker_pb2.FINISH_REASON_LENGTH: "length",
    thinker_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


# What each stage's summary says of waiting for the stage before it.
_WAITS = {"thinker": (), "talker": ("waited_for_text_ms",), "code2wav": ("waited_for_frames_ms",)}


LEAST_LOGPROB = -9999.0  # OpenAI's value for impossible tokens: JSON has no infinity


@dataclass
class Answer:
    """One choice, as far as it has come.

    Attributes:
        index: of the choice.
        audio_id: names its audio.
        expires_at: Unix time until which the id can be referred to.
        text: all of it so far.
        audio_bytes: PCM16 so far.
        text_tokens: tokens of the text so far.
        prompt: tokens of the prompt, by kind; of all turns, where tools run here.
        end: the stages' summaries, once finished.
        images: those that a tool made for it, in the form of the response.
        image_errors: why others could not be made.
    """

    index: int
    audio_id: str
    expires_at: int
    text: str = ""
    audio_bytes: int = 0
    text_tokens: int = 0
    prompt: thinker_pb2.PromptInfo = field(default_factory=thinker_pb2.PromptInfo)
    end: Finished | None = None
    images: list[dict[str, Any]] = field(default_factory=list)
    image_errors: list[dict[str, Any]] = field(default_factory=list)

    def take(self, event: AnswerEvent) -> None:
        """Counts an event in."""
        match event:
            case PromptRead(tokens, text):
                self.prompt, self.text = tokens, text
            case NextTurn(tokens):
                names = ("prompt_tokens", "audio_tokens", "image_tokens")
                both = {name: getattr(self.prompt, name) + getattr(tokens, name) for name in names}
                self.prompt = thinker_pb2.PromptInfo(**both)
            case ToolImage(preview=None):
                image = {"type": "image_url", "image_url": {"url": event.url}, "index": len(self.images)}
                self.images.append(image | {"revised_prompt": event.facts["revised_prompt"]})
            case ToolFailure(error):
                self.image_errors.append(error.body()["error"])
            case TextDelta(delta):
                self.text += delta.text
                self.text_tokens += len(delta.token_ids)
            case AudioDelta(pcm16):
                self.audio_bytes += len(pcm16)
            case Finished():
                self.end = event

    def audio(self, data: str, transcript: str) -> dict[str, Any]:
        """OpenAI's form of its audio, or of a piece: `data` is base64."""
        return {"id": self.audio_id, "data": data, "transcript": transcript, "expires_at": self.expires_at}

    @property
    def finished(self) -> Finished:
        """The stages' summaries."""
        assert self.end is not None, "the answer has not finished"
        return self.end

    @property
    def completion_tokens(self) -> int:
        """Tokens of the text: those so far, or all once the thinker has ended."""
        thinker = self.end and self.end.thinker
        return thinker.completion_tokens if thinker else self.text_tokens

    @property
    def reasoning_tokens(self) -> int:
        """Those of `completion_tokens` that are reasoning, once the thinker has ended."""
        thinker = self.end and self.end.thinker
        return thinker.reasoning_tokens if thinker else 0

    @property
    def frames(self) -> int:
        """Codec frames of the audio."""
        return self.finished.talker.frames if self.finished.talker else 0

    @property
    def sample_rate_hz(self) -> int:
        """Samples a second of the audio, which the answer must have."""
        assert self.finished.code2wav is not None
        return self.finished.code2wav.sample_rate_hz

    @property
    def audio_s(self) -> float:
        """How long its audio plays, in seconds; 0 without."""
        return self.audio_bytes / BYTES_PER_SAMPLE / self.sample_rate_hz if self.audio_bytes else 0.0

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why the answer ended: its text, or its speech where no thinker wrote the text."""
        end = self.finished
        if end.thinker is not None:
            return FINISH_REASON.get(end.thinker.finish_reason, "stop")
        return "length" if end.talker and end.talker.end == talker_pb2.SPEECH_END_LENGTH else "stop"

    def quartet(self) -> dict[str, Any]:
        """Where the time went, by stage, and what the audio is."""
        by_stage: dict[str, Any] = {}
        for kind, waits in _WAITS.items():
            if summary := getattr(self.finished, kind):
                by_stage[kind] = timings(summary.timings) | {name: getattr(summary, name) for name in waits}
        audio = {"frames": self.frames, "sample_rate_hz": self.sample_rate_hz} if self.finished.code2wav else {}
        return {"timings": by_stage} | audio


def timings(message: timings_pb2.Timings) -> dict[str, float | None]:
    """The phases of a request in one stage."""
    names = ("queue_ms", "prefill_ms", "first_output_ms", "decode_ms", "total_ms")
    phases: dict[str, float | None] = {name: getattr(message, name) for name in names}
    return phases if message.HasField("first_output_ms") else phases | {"first_output_ms": None}


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of a request: the prompt once, the answers together, as far as they have come. A codec frame is an audio
    token; those of an answer, and those of its text that are a thought, are counted when it has finished."""
    first = (answers[0].end or Finished()).thinker or thinker_pb2.GenerateSummary()
    prompt = answers[0].prompt
    read = first.prompt_tokens or prompt.prompt_tokens
    text = sum(answer.completion_tokens for answer in answers)
    audio = sum(answer.frames for answer in answers if answer.end)
    thought = sum(answer.reasoning_tokens for answer in answers)
    return {
        "prompt_tokens": read,
        "completion_tokens": text + audio,
        "total_tokens": read + text + audio,
        "prompt_tokens_details": {
            "cached_tokens": first.cached_tokens,
            "audio_tokens": prompt.audio_tokens,
            "image_tokens": prompt.image_tokens,
            "text_tokens": read - prompt.audio_tokens - prompt.image_tokens,
        },
        "completion_tokens_details": {"text_tokens": text, "audio_tokens": audio, "reasoning_tokens": thought},
    }


def logprobs(tokens: Iterable[thinker_pb2.TokenLogprob]) -> list[dict[str, Any]]:
    """OpenAI's form of tokens with their log-probabilities."""

    def entry(token: thinker_pb2.TokenLogprob) -> dict[str, Any]:
        logprob = max(token.logprob, LEAST_LOGPROB)
        return {"token": token.token, "logprob": logprob, "bytes": list(token.token_bytes)}

    return [entry(token) | {"top_logprobs": [entry(other) for other in token.top]} for token in tokens]


@dataclass
class WholeAnswer(Answer):
    """A choice that is sent in one piece.

    Attributes:
        tokens: log-probabilities, if they were asked for.
        prompt_tokens: those of the prompt with their log-probabilities, if these were asked for.
        token_ids: all that were sampled.
        calls: of tools, by their index.
        samples: PCM16.
        codes: codec frames, if they were asked for.
        reasoning: the thought before the text.
    """

    tokens: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: list[thinker_pb2.TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    samples: bytearray = field(default_factory=bytearray)
    codes: list[list[int]] = field(default_factory=list)
    reasoning: str = ""

    def take(self, event: AnswerEvent) -> None:
        """Counts an event in, and keeps what it brings."""
        super().take(event)
        match event:
            case TextDelta(delta):
                self.tokens += logprobs(delta.logprobs)
                self.token_ids += delta.token_ids
                self.reasoning += delta.reasoning
                for call in delta.tool_calls:
                    empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                    known = self.calls.setdefault(call.index, empty)
                    known["id"] += call.id
                    known["function"]["name"] += call.name
                    known["function"]["arguments"] += call.arguments_json
            case AudioDelta(pcm16):
                self.samples += pcm16
            case CodesDelta(frames):
                self.codes += frames
            case PromptTokens(tokens):
                self.prompt_tokens += tokens
