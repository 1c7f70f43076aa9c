"""Chat responses, streamed and whole."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pybase64

from gateway.answers.answer import Answer, WholeAnswer, logprobs, member_of
from gateway.answers.tools.events import ToolFailure, ToolPreview, ToolResult, image_url
from gateway.answers.turn import AnswerEvent
from gateway.media.encode import encode_audio
from gateway.pipeline.events import AudioDelta, Finished, PromptRead, TextDelta
from gateway.pipeline.kinds import Output


def choice(
    index: int, members: dict[str, Any], tokens: list[dict[str, Any]] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    """OpenAI's form of choice `index`; `members` has its message or delta."""
    content = None if tokens is None else {"content": tokens, "refusal": None}
    return {"index": index, **members, "logprobs": content, "finish_reason": finish_reason}


def chunk(
    index: int,
    modality: Output,
    delta: dict[str, Any],
    tokens: list[dict[str, Any]] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    """A chunk's own members: a delta of choice `index`."""
    return {"choices": [choice(index, {"delta": delta}, tokens, finish_reason)], "modality": modality}


@dataclass
class StreamedAnswer(Answer):
    """A choice in chunks of one modality each. Those of audio have the text since the one before as their transcript.

    Attributes:
        transcribed: characters of `text` sent beside audio.
        wav_rate_hz: samples a second of WAV pieces; None: plain PCM16.
    """

    transcribed: int = 0
    wav_rate_hz: int | None = None

    def chunks(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """The chunks' own members for an event that the answer has taken."""
        match event:
            case AudioDelta(pcm16):
                yield self._audio_chunk(pcm16)
            case TextDelta(delta):
                body: dict[str, Any] = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
                if delta.text:
                    body["content"] = delta.text
                if delta.tool_calls:
                    body["tool_calls"] = [_tool_call(call) for call in delta.tool_calls]
                tokens = logprobs(delta.logprobs) if delta.logprobs else None
                if body or tokens:
                    yield chunk(self.index, "text", body, tokens)
            case PromptRead(text=text):
                yield chunk(self.index, "text", {"role": "assistant", "content": text})
            case ToolPreview(members):
                url = image_url(members["partial_image_b64"], members["output_format"])
                partial = {"type": "image_url", "image_url": {"url": url}, "index": len(self.made["images"])}
                partial["partial_image_index"] = members["partial_image_index"]
                yield chunk(self.index, "image", {"partial_images": [partial]})
            case ToolResult() | ToolFailure() if event.output:
                yield chunk(self.index, event.output, {member_of(event): self.made[member_of(event)][-1:]})
            case Finished():
                if self.audio_bytes and self.transcribed < len(self.text):
                    yield self._audio_chunk(b"")
                last = chunk(self.index, "text", {}, finish_reason=self.finish_reason)
                yield last | {"quartet": self.quartet()}

    def _audio_chunk(self, pcm16: bytes) -> dict[str, Any]:
        data = pcm16 if self.wav_rate_hz is None else encode_audio(pcm16, self.wav_rate_hz, "wav")
        audio = self.audio(pybase64.b64encode_as_string(data), self.text[self.transcribed :])
        self.transcribed = len(self.text)
        return chunk(self.index, "audio", {"audio": audio})


def _tool_call(call) -> dict[str, Any]:
    """OpenAI's form of a ToolCallDelta: id, type and name only at the call's begin."""
    function = {"name": call.name} if call.name else {}
    begun = {"id": call.id, "type": "function"} if call.id else {}
    return {"index": call.index, **begun, "function": {**function, "arguments": call.arguments_json}}


async def whole_choice(answer: WholeAnswer, audio_format: str, wants_logprobs: bool) -> dict[str, Any]:
    """OpenAI's form of a finished answer, its audio as a file of `audio_format`."""
    calls = [call for _, call in sorted(answer.calls.items())]
    content = None if calls and not answer.text else answer.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    more = {
        "reasoning_content": answer.reasoning,
        "tool_calls": calls,
        **dict(sorted(answer.made.items(), reverse=True)),  # images before image_errors
    }
    message |= {name: value for name, value in more.items() if value}
    if answer.samples:
        file = await asyncio.to_thread(encode_audio, bytes(answer.samples), answer.sample_rate_hz, audio_format)
        message["audio"] = answer.audio(pybase64.b64encode_as_string(file), answer.text)
    return choice(answer.index, {"message": message}, answer.tokens if wants_logprobs else None, answer.finish_reason)
