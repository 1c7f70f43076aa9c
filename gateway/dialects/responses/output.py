"""Items of a response's output while they grow: each yields its events in OpenAI's order."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from gateway.answers.tools.events import ToolEvent, ToolFailure, ToolPreview, ToolProgress, ToolResult
from gateway.dialects.responses.items import new_item_id
from gateway.dialects.responses.messages import sealed
from gateway.dialects.responses.parts import Item

ResponseEvent = dict[str, Any]
"""In OpenAI's form, without its sequence number."""


class OutputItem:
    """The item at `index` of the output, in OpenAI's form; it grows."""

    def __init__(self, index: int, kind: str, **members: Any) -> None:
        self.index, self.is_open = index, True
        self.item: Item = {"id": new_item_id(kind), "type": kind, "status": "in_progress", **members}

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


class TextOutput(OutputItem):
    """An item with one part, a text."""

    def __init__(self, index: int, kind: str, part: dict[str, Any], **members: Any) -> None:
        super().__init__(index, kind, **members)
        self._part = part

    def open(self) -> Iterator[ResponseEvent]:
        yield from super().open()
        yield self.event("content_part.added", content_index=0, part=deepcopy(self._part))

    def text(self, text: str, **lists: list[Any]) -> Iterator[ResponseEvent]:
        """Text that follows; `lists`: what follows in further members."""
        self._part["text"] += text
        for name, values in lists.items():
            self._part[name] += values
        yield self.event(f"{self._part['type']}.delta", content_index=0, delta=text, **lists)

    def _last_words(self) -> Iterator[ResponseEvent]:
        done = {name: self._part[name] for name in ("text", "logprobs") if name in self._part}
        yield self.event(f"{self._part['type']}.done", content_index=0, **done)
        yield self.event("content_part.done", content_index=0, part=self._part)
        self.item["content"] = self.item.get("content") or [self._part]


class MessageOutput(TextOutput):
    """The assistant's text, and its sound, for which OpenAI has events but no item."""

    def __init__(self, index: int) -> None:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        super().__init__(index, "message", part, role="assistant", content=[])
        self._transcribed = 0

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


class ReasoningOutput(TextOutput):
    """The model's thought. `seals`: it also gets the form that clients send back."""

    def __init__(self, index: int, seals: bool) -> None:
        super().__init__(index, "reasoning", {"type": "reasoning_text", "text": ""}, summary=[])
        self._seals = seals

    def _last_words(self) -> Iterator[ResponseEvent]:
        yield from super()._last_words()
        if self._seals:
            self.item["encrypted_content"] = sealed(self._part["text"])


class CallOutput(OutputItem):
    """A call of a function of the client's, maybe of a `namespace`."""

    def __init__(self, index: int, name: str, call_id: str, namespace: str | None = None) -> None:
        within = {"namespace": namespace} if namespace else {}
        super().__init__(index, "function_call", arguments="", call_id=call_id, name=name, **within)

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
        super().__init__(index, self._type, **members)

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
