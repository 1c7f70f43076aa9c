"""The items of a response while the model makes them. A change returns its events."""

from typing import Any

from gateway.dialects.realtime.audio import OutputAudioStream
from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.conversation.items import Item, message, new_item
from gateway.dialects.realtime.conversation.truncation import truncate
from gateway.dialects.realtime.output.server_events import ItemEvent, NewItem, PlaybackClock, ServerEvent, SoundDelta
from gateway.dialects.realtime.output.sound_quality import SoundQuality
from gateway.dialects.realtime.settings.session import Session


class ResponseItem:
    """The item at `index` of a response. `conversation`: that it is added to."""

    conversation: Conversation | None = None

    def __init__(self, response_id: str, index: int, item: Item) -> None:
        self.item, self._is_open = item, True
        self._in_response = {"response_id": response_id, "output_index": index}
        self._place = {**self._in_response, "item_id": item.id}

    def open(self) -> list[ServerEvent]:
        item = self.item.public()
        events = [ServerEvent("response.output_item.added", {**self._in_response, "item": item})]
        if self.conversation is not None:
            events.append(NewItem("conversation.item.added", {"item": item}, self.item))
        return events

    def close(self, status: str) -> list[ServerEvent]:
        """Ends the item by the response's `status`. A second call returns nothing."""
        if not self._is_open:
            return []
        self._is_open = False
        events = self._last_events(status)
        self.item.members["status"] = "completed" if status == "completed" else "incomplete"
        item = self.item.public()
        events.append(ServerEvent("response.output_item.done", {**self._in_response, "item": item}))
        if self.conversation is not None:
            events.append(ItemEvent("conversation.item.done", {"item": item}, self.item))
        return events

    def _last_events(self, status: str) -> list[ServerEvent]:
        return []

    def _event(self, kind: str, **members: Any) -> ServerEvent:
        return ServerEvent(f"response.{kind}", {**self._place, **members})


class OutputMessage(ResponseItem):
    """The assistant's message, which has one part.

    Args:
        rate_hz: of the model's sound; None: the message is text.
        quality: is told how its sound is sent.
    """

    def __init__(
        self,
        response_id: str,
        index: int,
        session: Session,
        rate_hz: int | None,
        quality: SoundQuality | None = None,
    ) -> None:
        super().__init__(response_id, index, message("assistant", [], "in_progress"))
        output = session.response_config.audio.output
        self._audio = None if rate_hz is None else OutputAudioStream(output.format.type, rate_hz, output.speed)
        self.playback = PlaybackClock(self.item, output.format.type, quality)
        self._text = ""

    def open(self) -> list[ServerEvent]:
        events = super().open()
        self.item.content.append(self._part())
        return [*events, self._content("content_part.added", part=self._event_part())]

    def text(self, delta: str) -> list[ServerEvent]:
        self._text += delta
        if not self.item.is_cut:
            self.item.content[0] = self._part()
        kind = "output_text.delta" if self._audio is None else "output_audio_transcript.delta"
        return [self._content(kind, delta=delta)]

    def audio(self, pcm16: bytes) -> list[ServerEvent]:
        return [] if self._audio is None else self._sound(self._audio.add(pcm16))

    def cut(self) -> None:
        """Shortens the message to the sound that was sent, unless the client has said how much was heard."""
        if self._audio is not None:
            if not self.item.is_cut:
                truncate(self.item, 0, self.item.sent_ms)
            self._text = self.item.content[0]["transcript"]

    def _last_events(self, status: str) -> list[ServerEvent]:
        events = []
        if self._audio is None:
            events.append(self._content("output_text.done", text=self._text))
        else:
            if status in ("completed", "incomplete"):  # all that was written is spoken
                events += self._sound(self._audio.close())
            events.append(self._content("output_audio.done"))
            events.append(self._content("output_audio_transcript.done", transcript=self._text))
        return [*events, self._content("content_part.done", part=self._event_part())]

    def _sound(self, data: bytes) -> list[ServerEvent]:
        members = {**self._place, "content_index": 0}
        return [SoundDelta("response.output_audio.delta", members, data, self.playback)] if data else []

    def _content(self, kind: str, **members: Any) -> ServerEvent:
        return self._event(kind, content_index=0, **members)

    def _part(self) -> dict[str, Any]:
        if self._audio is None:
            return {"type": "output_text", "text": self._text}
        return {"type": "output_audio", "transcript": self._text}

    def _event_part(self) -> dict[str, Any]:
        """Types have other names in events of parts."""
        part = self._part()
        return {**part, "type": part["type"].removeprefix("output_")}


class OutputCall(ResponseItem):
    """A call of a function that the client runs."""

    def __init__(self, response_id: str, index: int, name: str, call_id: str) -> None:
        item = new_item("function_call", "in_progress", name=name, call_id=call_id, arguments="")
        super().__init__(response_id, index, item)

    def arguments(self, delta: str) -> list[ServerEvent]:
        self.item.members["arguments"] += delta
        return [self._event("function_call_arguments.delta", call_id=self.item.members["call_id"], delta=delta)]

    def _last_events(self, status: str) -> list[ServerEvent]:
        call = {name: self.item.members[name] for name in ("call_id", "name", "arguments")}
        return [self._event("function_call_arguments.done", **call)]
