"""Items of a response's output while they grow: each yields its events in OpenAI's order."""

from collections.abc import Iterator
from typing import Any

from gateway.answers.tools.events import ToolEvent, ToolFailure, ToolPreview, ToolProgress, ToolResult
from gateway.answers.tools.registry import TOOLS
from gateway.dialects.responses.items import call_id_prefix, new_id
from gateway.dialects.responses.messages import sealed
from gateway.dialects.responses.parts import Item

ResponseEvent = dict[str, Any]
"""In OpenAI's form, without its sequence number."""


class OutputItem:
    """The item at `index` of the output, in OpenAI's form; it grows."""

    def __init__(self, index: int, item: Item) -> None:
        self.index, self.item = index, item
        self.is_open = True

    def event(self, kind: str, **members: Any) -> ResponseEvent:
        return {"type": f"response.{kind}", "item_id": self.item["id"], "output_index": self.index, **members}

    def open(self) -> Iterator[ResponseEvent]:
        yield {"type": "response.output_item.added", "output_index": self.index, "item": dict(self.item)}

    def close(self, status: str) -> Iterator[ResponseEvent]:
        """Ends the item. `status`: "completed", "incomplete" or "failed". A second call yields nothing."""
        if self.is_open:
            self.is_open = False
            yield from self._last_words()
            self.item["status"] = status
            yield {"type": "response.output_item.done", "output_index": self.index, "item": dict(self.item)}

    def _last_words(self) -> Iterator[ResponseEvent]:
        yield from ()


class MessageOutput(OutputItem):
    """The assistant's text, and its sound, for which OpenAI has events but no item."""

    def __init__(self, index: int) -> None:
        head = {"id": new_id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        super().__init__(index, head)
        self._part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._transcribed = 0

    def open(self) -> Iterator[ResponseEvent]:
        yield from super().open()
        part = dict(self._part, logprobs=[])
        yield self.event("content_part.added", content_index=0, part=part)

    def text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[ResponseEvent]:
        self._part["text"] += text
        self._part["logprobs"] += logprobs
        yield self.event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def sound(self, audio_base64: str) -> Iterator[ResponseEvent]:
        """A piece of sound, or "", and the text since the last call."""
        if audio_base64:
            yield {"type": "response.audio.delta", "delta": audio_base64}
        text = self._part["text"]
        if self._transcribed < len(text):
            yield {"type": "response.audio.transcript.delta", "delta": text[self._transcribed :]}
            self._transcribed = len(text)

    def sounded(self, audio: dict[str, Any]) -> Iterator[ResponseEvent]:
        """The sound is complete. `audio`: further members of its part."""
        yield from self.sound("")
        yield {"type": "response.audio.done"}
        yield {"type": "response.audio.transcript.done"}
        self.item["content"] = [self._part, {"type": "output_audio", "transcript": self._part["text"], **audio}]

    def _last_words(self) -> Iterator[ResponseEvent]:
        text, logprobs = self._part["text"], self._part["logprobs"]
        yield self.event("output_text.done", content_index=0, text=text, logprobs=logprobs)
        yield self.event("content_part.done", content_index=0, part=self._part)
        self.item["content"] = self.item["content"] or [self._part]


class ReasoningOutput(OutputItem):
    """The model's thought. `seals`: it also gets the form that clients send back."""

    def __init__(self, index: int, seals: bool) -> None:
        super().__init__(index, {"id": new_id("rs"), "type": "reasoning", "summary": [], "status": "in_progress"})
        self._text, self._seals = "", seals

    def open(self) -> Iterator[ResponseEvent]:
        yield from super().open()
        part = {"type": "reasoning_text", "text": ""}
        yield self.event("content_part.added", content_index=0, part=part)

    def text(self, text: str) -> Iterator[ResponseEvent]:
        self._text += text
        yield self.event("reasoning_text.delta", content_index=0, delta=text)

    def _last_words(self) -> Iterator[ResponseEvent]:
        part = {"type": "reasoning_text", "text": self._text}
        yield self.event("reasoning_text.done", content_index=0, text=self._text)
        yield self.event("content_part.done", content_index=0, part=part)
        self.item["content"] = [part]
        if self._seals:
            self.item["encrypted_content"] = sealed(self._text)


class CallOutput(OutputItem):
    """A call of a function of the client's."""

    def __init__(self, index: int, name: str, call_id: str) -> None:
        head = {"id": new_id("fc"), "type": "function_call", "status": "in_progress"}
        super().__init__(index, head | {"arguments": "", "call_id": call_id, "name": name})

    def arguments(self, delta: str) -> Iterator[ResponseEvent]:
        self.item["arguments"] += delta
        yield self.event("function_call_arguments.delta", delta=delta)

    def _last_words(self) -> Iterator[ResponseEvent]:
        arguments, name = self.item["arguments"], self.item["name"]
        yield self.event("function_call_arguments.done", arguments=arguments, name=name)


class HostedOutput(OutputItem):
    """A call of a tool that runs here. `tool`: its name; `members`: further ones of the item."""

    def __init__(self, index: int, tool: str, members: Item) -> None:
        self._type = f"{tool}_call"
        head = {"id": new_id(call_id_prefix(TOOLS[tool])), "type": self._type, "status": "in_progress"}
        super().__init__(index, head | members)

    def open(self) -> Iterator[ResponseEvent]:
        yield from super().open()
        yield self.event(f"{self._type}.in_progress")

    def take(self, event: ToolEvent) -> Iterator[ResponseEvent]:
        match event:
            case ToolProgress():
                self.item["status"] = "generating"
                yield self.event(f"{self._type}.generating")
            case ToolPreview(members):
                yield self.event(f"{self._type}.partial_image", **members)
            case ToolResult(members):
                self.item |= members
                yield self.event(f"{self._type}.completed")
                yield from self.close("completed")
            case ToolFailure():
                self.item |= event.members
                yield from self.close("failed")
