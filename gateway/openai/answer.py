"""Chat responses, streamed and whole: what an answer adds up to, and how it is told."""

import asyncio
import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.media.encode import encode_audio
from gateway.pipeline.job import AudioDelta, Event, Finished, PromptRead, TextDelta
from quartet.v1 import talker_pb2, thinker_pb2, timings_pb2

FINISH_REASON = {
    thinker_pb2.FINISH_REASON_STOP: "stop",
    thinker_pb2.FINISH_REASON_LENGTH: "length",
    thinker_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_LEAST_LOGPROB = -9999.0  # OpenAI's value for impossible tokens: JSON has no infinity


@dataclass
class Answer:
    """One choice, as far as it has come.

    Attributes:
        index: of the choice.
        audio_id: names its audio.
        expires_at: Unix time until which the id can be referred to.
        text: all of it so far.
        transcribed: characters of `text` that were sent beside audio.
        audio_bytes: PCM16 so far.
        prompt: tokens of the prompt, by kind.
        end: the stages' summaries, once finished.
    """

    index: int
    audio_id: str
    expires_at: int
    text: str = ""
    transcribed: int = 0
    audio_bytes: int = 0
    prompt: thinker_pb2.PromptInfo = field(default_factory=thinker_pb2.PromptInfo)
    end: Finished | None = None

    def take(self, event: PromptRead | TextDelta | AudioDelta | Finished) -> None:
        """Counts an event in."""
        match event:
            case PromptRead(tokens, text):
                self.prompt, self.text = tokens, text
            case TextDelta(delta):
                self.text += delta.text
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
    def frames(self) -> int:
        """Codec frames of the audio."""
        return self.finished.talker.frames if self.finished.talker else 0

    @property
    def sample_rate_hz(self) -> int:
        """Samples a second of the audio, which the answer must have."""
        assert self.finished.code2wav is not None
        return self.finished.code2wav.sample_rate_hz

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why the answer ended: its text, or its speech where no thinker wrote the text."""
        end = self.finished
        if end.thinker is not None:
            return FINISH_REASON.get(end.thinker.finish_reason, "stop")
        return "length" if end.talker and end.talker.end == talker_pb2.SPEECH_END_LENGTH else "stop"

    def quartet(self) -> dict[str, Any]:
        """Where the time went, by stage, and what the audio is."""
        end, by_stage = self.finished, {}
        if end.thinker:
            by_stage["thinker"] = timings(end.thinker.timings)
        if end.talker:
            by_stage["talker"] = timings(end.talker.timings) | {"waited_for_text_ms": end.talker.waited_for_text_ms}
        if end.code2wav:
            waited = {"waited_for_frames_ms": end.code2wav.waited_for_frames_ms}
            by_stage["code2wav"] = timings(end.code2wav.timings) | waited
        audio = {"frames": self.frames, "sample_rate_hz": self.sample_rate_hz} if end.code2wav else {}
        return {"timings": by_stage} | audio


def timings(message: timings_pb2.Timings) -> dict[str, float | None]:
    """The phases of a request in one stage."""
    return {
        "queue_ms": message.queue_ms,
        "prefill_ms": message.prefill_ms,
        "first_output_ms": message.first_output_ms if message.HasField("first_output_ms") else None,
        "decode_ms": message.decode_ms,
        "total_ms": message.total_ms,
    }


def usage(answers: list[Answer]) -> dict[str, Any]:
    """Tokens of a request: the prompt once, the answers together. A codec frame is an audio token."""
    summaries = [answer.finished.thinker or thinker_pb2.GenerateSummary() for answer in answers]
    first, prompt = summaries[0], answers[0].prompt
    text = sum(summary.completion_tokens for summary in summaries)
    audio = sum(answer.frames for answer in answers)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": text + audio,
        "total_tokens": first.prompt_tokens + text + audio,
        "prompt_tokens_details": {
            "cached_tokens": first.cached_tokens,
            "audio_tokens": prompt.audio_tokens,
            "image_tokens": prompt.image_tokens,
            "text_tokens": first.prompt_tokens - prompt.audio_tokens - prompt.image_tokens,
        },
        "completion_tokens_details": {"text_tokens": text, "audio_tokens": audio, "reasoning_tokens": 0},
    }


def logprobs(delta: thinker_pb2.GenerateDelta) -> list[dict[str, Any]]:
    """OpenAI's form of the log-probabilities of a delta."""

    def entry(token: thinker_pb2.TokenLogprob) -> dict[str, Any]:
        logprob = max(token.logprob, _LEAST_LOGPROB)
        return {"token": token.token, "logprob": logprob, "bytes": list(token.token_bytes)}

    return [entry(token) | {"top_logprobs": [entry(other) for other in token.top]} for token in delta.logprobs]


class ChunkStream:
    """Makes a request's chunks. Text goes in `delta.content` of chunks with modality "text"; audio in `delta.audio` of
    chunks with modality "audio", each with the text since the one before as its transcript.

    Args:
        head: id, created and model of the response.
        answers: the choices, by index.
        wants_logprobs: whether chunks carry log-probabilities.
        include_usage: whether every chunk has a usage key and a last one has the numbers.
    """

    def __init__(self, head: dict[str, Any], answers: list[Answer], wants_logprobs: bool, include_usage: bool) -> None:
        self._head = head | {"object": "chat.completion.chunk"}
        self._answers = answers
        self._wants_logprobs = wants_logprobs
        self._include_usage = include_usage

    def chunks(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        """The chunks that say what happened to choice `index`; the answer must have taken the event already."""
        answer = self._answers[index]
        match event:
            case PromptRead(text=text):
                yield self._chunk(answer, "text", {"role": "assistant", "content": text})
            case TextDelta(delta):
                body: dict[str, Any] = {"content": delta.text} if delta.text else {}
                if delta.tool_calls:
                    body["tool_calls"] = [_tool_call(call) for call in delta.tool_calls]
                tokens = logprobs(delta) if self._wants_logprobs else []
                if body or tokens:
                    yield self._chunk(answer, "text", body, tokens)
            case AudioDelta(pcm16):
                yield self._audio(answer, pcm16)
            case Finished():
                if answer.audio_bytes and answer.transcribed < len(answer.text):
                    yield self._audio(answer, b"")
                last = self._chunk(answer, "text", {})
                last["choices"][0]["finish_reason"] = answer.finish_reason
                yield last | {"quartet": answer.quartet()}

    def usage(self) -> dict[str, Any]:
        """The chunk after all others."""
        return self._head | {"choices": [], "modality": "text", "usage": usage(self._answers)}

    def _audio(self, answer: Answer, pcm16: bytes) -> dict[str, Any]:
        transcript = answer.text[answer.transcribed :]
        answer.transcribed = len(answer.text)
        audio = answer.audio(base64.b64encode(pcm16).decode(), transcript)
        return self._chunk(answer, "audio", {"audio": audio})

    def _chunk(
        self,
        answer: Answer,
        modality: Literal["text", "audio"],
        delta: dict[str, Any],
        tokens: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": answer.index,
            "delta": delta,
            "logprobs": {"content": tokens, "refusal": None} if tokens else None,
            "finish_reason": None,
        }
        chunk = self._head | {"choices": [choice], "modality": modality}
        return chunk | {"usage": None} if self._include_usage else chunk


def _tool_call(call) -> dict[str, Any]:
    """OpenAI's form of a ToolCallDelta: id, type and name only where the call begins."""
    function = {"name": call.name} if call.name else {}
    begun = {"id": call.id, "type": "function"} if call.id else {}
    return {"index": call.index, **begun, "function": {**function, "arguments": call.arguments_json}}


class WholeAnswers:
    """Collects a request's events and makes its response.

    Args:
        head: id, created and model of the response.
        answers: the choices, by index.
        wants_logprobs: whether choices carry log-probabilities.
        audio_format: format of the audio files.
    """

    def __init__(self, head: dict[str, Any], answers: list[Answer], wants_logprobs: bool, audio_format: str) -> None:
        self._head = head | {"object": "chat.completion"}
        self._answers = answers
        self._wants_logprobs = wants_logprobs
        self._audio_format = audio_format
        self._tokens: list[list[dict[str, Any]]] = [[] for _ in answers]
        self._calls: list[dict[int, dict[str, Any]]] = [{} for _ in answers]
        self._samples = [bytearray() for _ in answers]

    def take(self, index: int, event: Event) -> None:
        """Collects what happened to choice `index`; the answer must have taken the event already."""
        match event:
            case TextDelta(delta):
                if self._wants_logprobs:
                    self._tokens[index] += logprobs(delta)
                for call in delta.tool_calls:
                    empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                    known = self._calls[index].setdefault(call.index, empty)
                    known["id"] += call.id
                    known["function"]["name"] += call.name
                    known["function"]["arguments"] += call.arguments_json
            case AudioDelta(pcm16):
                self._samples[index] += pcm16

    async def response(self) -> dict[str, Any]:
        """The body, once every answer has finished."""
        choices = [await self._choice(answer) for answer in self._answers]
        if len(choices) > 1:
            for choice, answer in zip(choices, self._answers, strict=True):
                choice["quartet"] = answer.quartet()
        return self._head | {
            "choices": choices,
            "usage": usage(self._answers),
            "modality": "audio" if any(self._samples) else "text",
            "quartet": self._answers[0].quartet(),
        }

    async def _choice(self, answer: Answer) -> dict[str, Any]:
        calls = [call for _, call in sorted(self._calls[answer.index].items())]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not answer.text else answer.text,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        if samples := self._samples[answer.index]:
            file = await asyncio.to_thread(_encode_base64, bytes(samples), answer.sample_rate_hz, self._audio_format)
            message["audio"] = answer.audio(file, answer.text)
        return {
            "index": answer.index,
            "message": message,
            "logprobs": {"content": self._tokens[answer.index], "refusal": None} if self._wants_logprobs else None,
            "finish_reason": answer.finish_reason,
        }


def _encode_base64(pcm16: bytes, sample_rate_hz: int, audio_format: str) -> str:
    return base64.b64encode(encode_audio(pcm16, sample_rate_hz, audio_format)).decode()
