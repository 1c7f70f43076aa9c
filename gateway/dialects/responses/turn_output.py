"""One answer of the thinker within a response, as items and their events."""

from collections.abc import Generator, Iterator
from typing import Any

import pybase64

from gateway.answers.answer import WholeAnswer, logprobs
from gateway.answers.turn import Turn
from gateway.dialects.responses.output import CallOutput, MessageOutput, OutputItem, ReasoningOutput, ResponseEvent
from gateway.dialects.responses.spec import ResponseSpec
from gateway.media.encode import encode_audio
from gateway.pipeline.events import AudioDelta, Event, TextDelta, TextEnd
from quartet.v1 import thinker_pb2


class TurnOutput:
    """One answer. Its items are added to those of the response, `outputs`."""

    def __init__(self, spec: ResponseSpec, outputs: list[OutputItem]) -> None:
        self._spec, self._outputs, self._began = spec, outputs, len(outputs)
        self.answer = WholeAnswer(0, spec.id, 0)
        self._message: MessageOutput | None = None
        self._thought: ReasoningOutput | None = None
        self._calls: dict[int, CallOutput] = {}
        self._logprobs: list[dict[str, Any]] = []

    def take(self, event: Event) -> Iterator[ResponseEvent]:
        self.answer.take(event)
        match event:
            case TextDelta(delta):
                yield from self._written(delta)
            case TextEnd(summary) if summary.finish_reason != thinker_pb2.FINISH_REASON_LENGTH:
                for output in (self._thought, *self._calls.values()):  # clients can run a call before the sound ends
                    yield from output.close("completed") if output else ()
            case AudioDelta(pcm16):
                message = yield from self._said()
                yield from message.sound(pybase64.b64encode_as_string(pcm16) if self._spec.request.stream else "")

    def close(self, turn: Turn, audio_format: str) -> Iterator[ResponseEvent]:
        """Its last events. Blocking if the sound becomes a file of `audio_format`, as without `stream`."""
        self.answer.take(turn.end)
        if len(self._outputs) == self._began and not turn.hosted:  # clients expect a message, if an empty one
            yield from self._said()
        if self._message is not None and self.answer.audio_bytes:
            rate_hz = self.answer.sample_rate_hz
            audio: dict[str, Any] = {"format": audio_format, "sample_rate_hz": rate_hz}
            if not self._spec.request.stream:
                file = encode_audio(bytes(self.answer.samples), rate_hz, audio_format)
                audio["data"] = pybase64.b64encode_as_string(file)
            yield from self._message.sounded(audio)
        for output in self._outputs[self._began :]:
            yield from output.close("incomplete" if turn.is_cut_short else "completed")

    def _written(self, delta: thinker_pb2.GenerateDelta) -> Iterator[ResponseEvent]:
        self._logprobs += logprobs(delta.logprobs)
        if delta.reasoning and self._spec.request.include_reasoning is False:
            self._logprobs = []
        elif delta.reasoning:
            if self._thought is None:
                self._thought = ReasoningOutput(len(self._outputs), self._spec.request.wants_encrypted_reasoning)
                yield from self._opened(self._thought)
            yield from self._thought.text(delta.reasoning)
            self._logprobs = []  # are told of the answer only
        if delta.text:
            message = yield from self._said()
            yield from message.text(delta.text, logprobs=self._logprobs)
            self._logprobs = []
        for call in delta.tool_calls:
            if not call.index or self._spec.request.parallel_tool_calls is not False:
                yield from self._call(call)

    def _said(self) -> Generator[ResponseEvent, None, MessageOutput]:
        """Opens the message, if it is not open; returns it."""
        if self._message is None:
            yield from self._thought.close("completed") if self._thought else ()
            self._message = MessageOutput(len(self._outputs))
            yield from self._opened(self._message)
        return self._message

    def _call(self, delta: thinker_pb2.ToolCallDelta) -> Iterator[ResponseEvent]:
        if delta.name:
            yield from self._thought.close("completed") if self._thought else ()
            if self._message is not None and "audio" not in (self._spec.request.modalities or ()):
                yield from self._message.close("completed")
            namespace, name = self._spec.tools.namespaces.get(delta.name, (None, delta.name))
            call = self._calls[delta.index] = CallOutput(len(self._outputs), name, delta.id, namespace)
            yield from self._opened(call)
        if delta.arguments_json:
            yield from self._calls[delta.index].arguments(delta.arguments_json)

    def _opened(self, output: OutputItem) -> Iterator[ResponseEvent]:
        self._outputs.append(output)
        yield from output.open()
