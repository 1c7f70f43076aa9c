"""An answer's text, audio, images, tokens and times."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.answers.tools.events import ToolFailure, ToolResult, made_url
from gateway.answers.turn import AnswerEvent, NextTurn
from gateway.pipeline.events import AudioDelta, CodesDelta, Finished, PromptRead, PromptScores, PromptTokens, TextDelta
from quartet.v1 import talker_pb2, thinker_pb2, timings_pb2

_FINISH_REASON = {
    thinker_pb2.FINISH_REASON_STOP: "stop",
    thinker_pb2.FINISH_REASON_LENGTH: "length",
    thinker_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


# Beside its timings, what each stage's summary says of waiting for the stage before it.
_WAITS = {"thinker": (), "talker": ("waited_for_text_ms",), "code2wav": ("waited_for_frames_ms",)}
_TIMINGS = ("queue_ms", "prefill_ms", "first_output_ms", "decode_ms", "total_ms")
LEAST_LOGPROB = -9999.0  # OpenAI's value for impossible tokens: JSON has no infinity


@dataclass
class Answer:
    """One choice, as far as it has come.

    Attributes:
        expires_at: Unix time until which `audio_id` can be referred to.
        audio_bytes: PCM16 so far.
        prompt: tokens of the prompt, by kind; of all turns, where tools run here.
        end: the stages' summaries; empty until it has ended.
        made: what tools made, and their errors, by the response's member: images, image_errors, videos, ...
    """

    index: int
    audio_id: str
    expires_at: int
    text: str = ""
    audio_bytes: int = 0
    text_tokens: int = 0
    prompt: thinker_pb2.PromptInfo = field(default_factory=thinker_pb2.PromptInfo)
    end: Finished = field(default_factory=Finished)
    made: defaultdict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def take(self, event: AnswerEvent) -> None:
        match event:  # what comes most often, first
            case AudioDelta(pcm16):
                self.audio_bytes += len(pcm16)
            case TextDelta(delta):
                self.text += delta.text
                self.text_tokens += len(delta.token_ids)
            case PromptRead(tokens, text):
                self.prompt, self.text = tokens, text
            case NextTurn(tokens):
                names = ("prompt_tokens", "audio_tokens", "image_tokens")
                both = {name: getattr(self.prompt, name) + getattr(tokens, name) for name in names}
                self.prompt = thinker_pb2.PromptInfo(**both)
            case ToolResult(members, "image"):
                images = self.made[member_of(event)]
                image = {"type": "image_url", "image_url": {"url": made_url(members)}, "index": len(images)}
                images.append(image | {"revised_prompt": members.get("revised_prompt")})
            case ToolResult(members) if event.output:
                self.made[member_of(event)].append(members)
            case ToolFailure(error) if event.output:
                self.made[member_of(event)].append(error.body()["error"])
            case Finished():
                self.end = event

    def audio(self, data: str, transcript: str) -> dict[str, Any]:
        """OpenAI's form of its audio, or of a piece; `data` is base64."""
        return {"id": self.audio_id, "data": data, "transcript": transcript, "expires_at": self.expires_at}

    @property
    def has_ended(self) -> bool:
        return bool(self.end.summaries)

    @property
    def completion_tokens(self) -> int:
        """Of the text: those so far, or all once the thinker has ended."""
        return self.end.thinker.completion_tokens if self.end.thinker else self.text_tokens

    @property
    def frames(self) -> int:
        """Codec frames of the audio, once the talker has ended."""
        return self.end.talker.frames if self.end.talker else 0

    @property
    def sample_rate_hz(self) -> int:
        """Of the audio, which the answer must have."""
        assert self.end.code2wav is not None
        return self.end.code2wav.sample_rate_hz

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for the end of the text, or of the speech where no thinker wrote the text."""
        thinker, talker = self.end.thinker, self.end.talker
        if thinker is not None:
            return _FINISH_REASON.get(thinker.finish_reason, "stop")
        return "length" if talker and talker.end == talker_pb2.SPEECH_END_LENGTH else "stop"

    @property
    def stop_reason(self) -> dict[str, str | None]:
        """vLLM's member of a choice that has ended: the stop string that ended it."""
        return {"stop_reason": (self.end.thinker and self.end.thinker.stop) or None}

    def quartet(self) -> dict[str, Any]:
        """Timings by stage, and what the audio is."""
        by_stage: dict[str, Any] = {}
        for kind, waits in _WAITS.items():
            if summary := self.end.summaries.get(kind):
                by_stage[kind] = timings(summary.timings) | {name: getattr(summary, name) for name in waits}
        audio = {"frames": self.frames, "sample_rate_hz": self.sample_rate_hz} if self.end.code2wav else {}
        return {"timings": by_stage} | audio


def member_of(event: ToolResult | ToolFailure) -> str:
    """The response's member that has what a tool made, or why it failed."""
    return f"{event.output}_errors" if isinstance(event, ToolFailure) else f"{event.output}s"


def timings(message: timings_pb2.Timings) -> dict[str, float | None]:
    """The phases of a request in one stage."""
    phases: dict[str, float | None] = {name: getattr(message, name) for name in _TIMINGS}
    return phases if message.HasField("first_output_ms") else phases | {"first_output_ms": None}


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of a request: the prompt once, the answers together, as far as they have come. A codec frame is an audio
    token; frames and reasoning count once the answer has ended.
    """
    first = answers[0].end.thinker or thinker_pb2.GenerateSummary()
    prompt = answers[0].prompt
    read = first.prompt_tokens or prompt.prompt_tokens
    text = sum(answer.completion_tokens for answer in answers)
    audio = sum(answer.frames for answer in answers)
    thought = sum(answer.end.thinker.reasoning_tokens for answer in answers if answer.end.thinker)
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


def token_name(token: thinker_pb2.TokenLogprob, as_id: bool) -> str:
    return f"token_id:{token.token_id}" if as_id else token.token


def logprobs(tokens: Iterable[thinker_pb2.TokenLogprob], as_ids: bool = False) -> list[dict[str, Any]]:
    def entry(token: thinker_pb2.TokenLogprob) -> dict[str, Any]:
        logprob = max(token.logprob, LEAST_LOGPROB)
        return {"token": token_name(token, as_ids), "logprob": logprob, "bytes": list(token.token_bytes)}

    return [entry(token) | {"top_logprobs": [entry(other) for other in token.top]} for token in tokens]


def prompt_logprobs(tokens: Iterable[thinker_pb2.TokenLogprob]) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's form: each token of the prompt and its alternatives by id; None for the first, which has none."""

    def entry(token: thinker_pb2.TokenLogprob) -> dict[str, Any]:
        return {"logprob": max(token.logprob, LEAST_LOGPROB), "rank": token.rank, "decoded_token": token.token}

    return [
        None if math.isnan(token.logprob) else {str(each.token_id): entry(each) for each in (token, *token.top)}
        for token in tokens
    ]


@dataclass
class WholeAnswer(Answer):
    """A choice that is sent in one piece.

    Attributes:
        tokens, prompt_tokens, prompt_scores: log-probabilities, if requested.
        calls: of tools, by their index.
        samples: PCM16.
    """

    tokens: list[thinker_pb2.TokenLogprob] = field(default_factory=list)
    prompt_tokens: list[thinker_pb2.TokenLogprob] = field(default_factory=list)
    prompt_scores: thinker_pb2.PromptScores | None = None
    token_ids: list[int] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    samples: bytearray = field(default_factory=bytearray)
    codes: list[list[int]] = field(default_factory=list)
    reasoning: str = ""

    def take(self, event: AnswerEvent) -> None:
        super().take(event)
        match event:
            case TextDelta(delta):
                self.tokens += delta.logprobs
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
            case PromptScores(scores):
                self.prompt_scores = scores
