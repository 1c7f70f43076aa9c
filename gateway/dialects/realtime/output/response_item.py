"""The items of a response, as they are made: steps, each of which makes one event when it is told.

A step that is told writes to the conversation, so that one which is held back, and dropped, leaves no trace there.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pybase64

from gateway.dialects.realtime.audio import OutputAudio, rate_hz_of
from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.conversation.items import Item, message
from gateway.dialects.realtime.conversation.truncation import cut
from gateway.dialects.realtime.events import RealtimeError, new_id, server_event
from gateway.dialects.realtime.settings.session import Session

Step = Callable[[], dict[str, Any]]


class Output:
    """One item of a response.

    Args:
        response_id: of the response.
        index: among its items.
        item: in progress.
    """

    def __init__(self, response_id: str, index: int, item: Item) -> None:
        self.item, self.conversation = item, None
        self._in_response = {"response_id": response_id, "output_index": index}
        self._place = {**self._in_response, "item_id": item.id}

    conversation: Conversation | None

    def open(self) -> list[Step]:
        """The item is begun."""
        item = self.item.public()
        return [
            lambda: server_event("response.output_item.added", **self._in_response, item=item),
            *([] if self.conversation is None else [lambda: self._added(item)]),
        ]

    def close(self, status: str) -> list[Step]:
        """The item is finished, or ended, as the response's `status` says."""
        self.item.members["status"] = "completed" if status == "completed" else "incomplete"
        item = self.item.public()
        steps: list[Step] = [lambda: server_event("response.output_item.done", **self._in_response, item=item)]
        if self.conversation is not None:
            steps.append(lambda: self._told("conversation.item.done", item))
        return steps

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        assert self.conversation is not None
        with suppress(RealtimeError):  # it is full: the answer is heard, and forgotten
            self.conversation.add(self.item)
        return self._told("conversation.item.added", item)

    def _told(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        assert self.conversation is not None
        known = self.conversation.find(self.item.id)  # it may have been deleted
        previous = self.conversation.previous_id(self.item.id) if known else None
        return server_event(kind, previous_item_id=previous, item=item)

    def _event(self, kind: str, **members: Any) -> Step:
        return lambda: server_event(f"response.{kind}", **self._place, **members)


class MessageOutput(Output):
    """What the assistant says, of one part.

    Args:
        response_id: of the response.
        index: among its items.
        session: how it sounds.
        rate_hz: samples a second of its sound; None: it is text only.
    """

    def __init__(self, response_id: str, index: int, session: Session, rate_hz: int | None) -> None:
        super().__init__(response_id, index, message("assistant", [], "in_progress"))
        self._audio = None if rate_hz is None else OutputAudio(session.output_format, rate_hz, session.speed)
        self._bytes_per_s = rate_hz_of(session.output_format) * (2 if session.output_format == "audio/pcm" else 1)
        self._text, self._sent_bytes, self._first_sent = "", 0, 0.0
        self._is_closed = False

    @property
    def played_at(self) -> float:
        """The `time.monotonic()` at which a client that plays the sound as it comes has played all of it; 0 without."""
        return self._first_sent and self._first_sent + self._sent_bytes / self._bytes_per_s

    def open(self) -> list[Step]:
        """The message, and its one part."""
        steps = super().open()
        self.item.content.append(self._part())
        return [*steps, self._content("content_part.added", part=self._told_part())]

    def text(self, delta: str) -> list[Step]:
        """More text."""
        self._text += delta
        if not self.item.is_cut:
            self.item.content[0] = self._part()
        kind = "output_text.delta" if self._audio is None else "output_audio_transcript.delta"
        return [self._content(kind, delta=delta)]

    def audio(self, pcm16: bytes) -> list[Step]:
        """More sound: mono PCM16."""
        return [] if self._audio is None else self._sound(self._audio.add(pcm16))

    def cut(self) -> None:
        """The rest is not said: the message is what was sent of it, unless the client has said what was heard."""
        if self._audio is not None:
            if not self.item.is_cut:
                cut(self.item, 0, self.item.sent_ms)
            self._text = self.item.content[0]["transcript"]

    def close(self, status: str) -> list[Step]:
        """The sound's rest, and the ends of all; nothing, if that was told before."""
        if self._is_closed:
            return []
        self._is_closed = True
        steps = []
        if self._audio is None:
            steps.append(self._content("output_text.done", text=self._text))
        else:
            if status in ("completed", "incomplete"):  # all that was written is spoken
                steps += self._sound(self._audio.close())
            steps.append(self._content("output_audio.done"))
            steps.append(self._content("output_audio_transcript.done", transcript=self._text))
        steps.append(self._content("content_part.done", part=self._told_part()))
        return [*steps, *super().close(status)]

    def _sound(self, data: bytes) -> list[Step]:
        return [SoundStep(self, data)] if data else []

    def sent(self, data: bytes) -> dict[str, Any]:
        """Some of its sound is sent: the event."""
        self._sent_bytes += len(data)
        self._first_sent = self._first_sent or time.monotonic()
        if not self.item.is_cut:
            self.item.sent_ms = -(-self._sent_bytes * 1000 // self._bytes_per_s)  # clients may round up, too
        return self._content("output_audio.delta", delta=pybase64.b64encode_as_string(data))()

    def _content(self, kind: str, **members: Any) -> Step:
        return self._event(kind, content_index=0, **members)

    def _part(self) -> dict[str, Any]:
        if self._audio is None:
            return {"type": "output_text", "text": self._text}
        return {"type": "output_audio", "transcript": self._text}

    def _told_part(self) -> dict[str, Any]:
        """The part as the events of parts name it."""
        if self._audio is None:
            return {"type": "text", "text": self._text}
        return {"type": "audio", "transcript": self._text}


@dataclass(frozen=True)
class SoundStep:
    """Some of a message's sound, in the session's format."""

    message: MessageOutput
    data: bytes

    def __call__(self) -> dict[str, Any]:
        return self.message.sent(self.data)


class CallOutput(Output):
    """A call of a function."""

    def __init__(self, response_id: str, index: int, name: str, call_id: str) -> None:
        head = {"id": new_id("item"), "object": "realtime.item", "type": "function_call", "status": "in_progress"}
        super().__init__(response_id, index, Item({**head, "name": name, "call_id": call_id, "arguments": ""}))
        self._name, self._call_id, self._is_closed = name, call_id, False

    def arguments(self, delta: str) -> list[Step]:
        """More of the arguments' JSON."""
        self.item.members["arguments"] += delta
        return [self._event("function_call_arguments.delta", call_id=self._call_id, delta=delta)]

    def close(self, status: str) -> list[Step]:
        """All of the arguments; nothing, if that was told before."""
        if self._is_closed:
            return []
        self._is_closed = True
        done = self._event(
            "function_call_arguments.done",
            call_id=self._call_id,
            name=self._name,
            arguments=self.item.members["arguments"],
        )
        return [done, *super().close(status)]
