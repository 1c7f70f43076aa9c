"""The parts of chat responses that streamed and whole ones share, and what an answer adds up to."""

from dataclasses import dataclass, field
from typing import Any

from gateway.pipeline.job import AudioDelta, Finished, PromptRead, TextDelta
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

    def next_transcript(self) -> str:
        """Text that no audio chunk has carried yet."""
        piece = self.text[self.transcribed :]
        self.transcribed = len(self.text)
        return piece

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
