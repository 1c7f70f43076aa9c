"""Chat responses, streamed and whole."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pybase64

from gateway.answers.answer import Answer, WholeAnswer, logprobs, member_of
from gateway.answers.request import ChatCompletionRequest
from gateway.answers.tools.events import ToolFailure, ToolPreview, ToolResult, image_url
from gateway.answers.turn import AnswerEvent
from gateway.media.encode import encode_audio
from gateway.pipeline.events import AudioDelta, Finished, PromptRead, TextDelta
from gateway.pipeline.kinds import Output
from quartet.v1 import thinker_pb2

_NO_IDS: Mapping[str, Any] = MappingProxyType({})


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
    ids: Mapping[str, Any] = _NO_IDS,
) -> dict[str, Any]:
    """A chunk's own members: a delta of choice `index`."""
    members = {"delta": delta, **ids} if ids else {"delta": delta}
    return {"choices": [choice(index, members, tokens, finish_reason)], "modality": modality}


@dataclass(frozen=True)
class Form:
    """What a request wants to get of its answers.

    Attributes:
        one_call: further calls are left out.
        hides: neither the thought, nor the tokens that it could be read from.
    """

    role: str = "assistant"
    echoed: str = ""
    token_ids: bool = False
    tokens_as_ids: bool = False
    one_call: bool = False
    reasoning: bool = True
    hides: bool = False

    @classmethod
    def of(cls, request: ChatCompletionRequest, model_reasons: bool) -> "Form":
        reasoning = request.include_reasoning is not False
        return cls(
            role=request.answer_role,
            echoed=request.echoed,
            token_ids=bool(request.return_token_ids),
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            one_call=request.parallel_tool_calls is False,
            reasoning=reasoning,
            hides=model_reasons and not reasoning,
        )

    def has(self, call: int) -> bool:
        """Whether call number `call` is in the answer."""
        return not call or not self.one_call

    def logprobs(self, tokens: Sequence[thinker_pb2.TokenLogprob]) -> list[dict[str, Any]] | None:
        return None if self.hides else logprobs(tokens, self.tokens_as_ids)

    def ids(self, token_ids: Sequence[int]) -> Mapping[str, Any]:
        """A choice's member with the ids of its tokens, if they are wanted."""
        return {"token_ids": None if self.hides else list(token_ids)} if self.token_ids else _NO_IDS


@dataclass
class StreamedAnswer(Answer):
    """A choice in chunks of one modality each. Those of audio have the text since the one before as their transcript.

    Attributes:
        form: how it is wanted.
        transcribed: characters of `text` sent beside audio.
        wav_rate_hz: samples a second of WAV pieces; None: plain PCM16.
    """

    form: Form = Form()
    transcribed: int = 0
    wav_rate_hz: int | None = None

    def chunks(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """The chunks' own members for an event that the answer has taken."""
        match event:
            case AudioDelta(pcm16):
                yield self._audio_chunk(pcm16)
            case TextDelta(delta, is_plain):
                thought = delta.reasoning if self.form.reasoning else ""
                body: dict[str, Any] = {"reasoning_content": thought, "reasoning": thought} if thought else {}
                if delta.text:
                    body["content"] = delta.text
                tokens = None
                if not is_plain:
                    if calls := [call for call in delta.tool_calls if self.form.has(call.index)]:
                        body["tool_calls"] = list(map(_tool_call, calls))
                    tokens = self.form.logprobs(delta.logprobs) if delta.logprobs else None
                ids = self.form.ids(delta.token_ids) if self.form.token_ids else _NO_IDS  # most want none
                if body or tokens or ids.get("token_ids"):
                    yield chunk(self.index, "text", body, tokens, ids=ids)
            case PromptRead(prompt, text):
                begun = chunk(self.index, "text", {"role": self.form.role, "content": self.form.echoed + text})
                yield begun | ({"prompt_token_ids": list(prompt.token_ids)} if self.form.token_ids else {})
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
                last = chunk(self.index, "text", {}, finish_reason=self.finish_reason, ids=self.stop_reason)
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


async def whole_choice(answer: WholeAnswer, audio_format: str, wants_logprobs: bool, form: Form) -> dict[str, Any]:
    """OpenAI's form of a finished answer, its audio as a file of `audio_format`."""
    calls = [call for index, call in sorted(answer.calls.items()) if form.has(index)]
    text = form.echoed + answer.text
    thought = answer.reasoning if form.reasoning else ""
    message: dict[str, Any] = {"role": form.role, "content": None if calls and not text else text, "refusal": None}
    message["reasoning"] = thought or None  # vLLM's name, always there; the other one is everybody else's
    more = {
        "reasoning_content": thought,
        "tool_calls": calls,
        **dict(sorted(answer.made.items(), reverse=True)),  # images before image_errors
    }
    message |= {name: value for name, value in more.items() if value}
    if answer.samples:
        file = await asyncio.to_thread(encode_audio, bytes(answer.samples), answer.sample_rate_hz, audio_format)
        message["audio"] = answer.audio(pybase64.b64encode_as_string(file), answer.text)
    tokens = form.logprobs(answer.tokens) if wants_logprobs else None
    members = {"message": message, "token_ids": None, **form.ids(answer.token_ids), **answer.stop_reason}
    return choice(answer.index, members, tokens, answer.finish_reason)
