"""Whole chat responses: pipeline events add up to one chat.completion object."""

import asyncio
import base64
from typing import Any

from gateway.openai.answer import Answer, logprobs, usage
from gateway.openai.audio import encode
from gateway.pipeline.job import AudioDelta, Event, TextDelta


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
            message["audio"] = {
                "id": answer.audio_id,
                "data": file,
                "transcript": answer.text,
                "expires_at": answer.expires_at,
            }
        return {
            "index": answer.index,
            "message": message,
            "logprobs": {"content": self._tokens[answer.index], "refusal": None} if self._wants_logprobs else None,
            "finish_reason": answer.finish_reason,
        }


def _encode_base64(pcm16: bytes, sample_rate_hz: int, audio_format: str) -> str:
    return base64.b64encode(encode(pcm16, sample_rate_hz, audio_format)).decode()
