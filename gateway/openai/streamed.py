"""Streamed chat responses: pipeline events become chat.completion.chunk objects."""

import base64
import json
from collections.abc import Iterator
from typing import Any, Literal

from gateway.openai.answer import Answer, logprobs, usage
from gateway.pipeline.job import AudioDelta, Event, Finished, PromptRead, TextDelta

DONE = b"data: [DONE]\n\n"


def sse(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


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
        audio = {
            "id": answer.audio_id,
            "data": base64.b64encode(pcm16).decode(),
            "transcript": answer.next_transcript(),
            "expires_at": answer.expires_at,
        }
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
