"""Events of a response before they are sent: the conversation changes when an event is applied."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pybase64

from gateway.dialects.realtime.audio import rate_hz_of
from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.conversation.items import Item
from gateway.dialects.realtime.events import RealtimeError, server_event
from gateway.dialects.realtime.output.sound_quality import SoundQuality


@dataclass(frozen=True)
class ServerEvent:
    kind: str
    members: dict[str, Any]

    def apply(self, conversation: Conversation | None) -> dict[str, Any]:
        """Changes the conversation. Returns the event to send."""
        return server_event(self.kind, **self.members)


@dataclass(frozen=True)
class ItemEvent(ServerEvent):
    """Names the item before `item` in the conversation."""

    item: Item

    def apply(self, conversation: Conversation | None) -> dict[str, Any]:
        assert conversation is not None
        is_there = conversation.find(self.item.id) is not None  # the client may have deleted it
        previous = conversation.previous_id(self.item.id) if is_there else None
        return server_event(self.kind, previous_item_id=previous, **self.members)


@dataclass(frozen=True)
class NewItem(ItemEvent):
    def apply(self, conversation: Conversation | None) -> dict[str, Any]:
        assert conversation is not None
        with suppress(RealtimeError):  # a full conversation: the client hears the answer, the model forgets it
            conversation.add(self.item)
        return super().apply(conversation)


class PlaybackClock:
    """Counts the sound of an item that was sent, also in its `sent_ms`. Says how it sounds to `quality`."""

    def __init__(self, item: Item, audio_format: str, quality: SoundQuality | None = None) -> None:
        self._item, self._quality, self._sent_bytes = item, quality, 0
        self._began_at = 0.0  # as if the sound had been played without the silences within it
        self._bytes_per_s = rate_hz_of(audio_format) * (2 if audio_format == "audio/pcm" else 1)

    @property
    def ends_at(self) -> float:
        """`time.monotonic()` when a client that plays at once has played all; 0 before the first sound."""
        return self._began_at and self._began_at + self._sent_bytes / self._bytes_per_s

    def add(self, size: int) -> None:
        now = time.monotonic()
        is_first, late_s = not self._began_at, now - self.ends_at
        if is_first or late_s > 0:
            self._began_at += late_s
        if self._quality is not None and is_first:
            self._quality.sounded()
        elif self._quality is not None and late_s > 0:
            self._quality.ran_dry(late_s)
        self._sent_bytes += size
        if not self._item.is_cut:
            self._item.sent_ms = -(-self._sent_bytes * 1000 // self._bytes_per_s)  # clients may round up, too


@dataclass(frozen=True)
class SoundDelta(ServerEvent):
    data: bytes
    playback: PlaybackClock

    def apply(self, conversation: Conversation | None) -> dict[str, Any]:
        self.playback.add(len(self.data))
        return server_event(self.kind, **self.members, delta=pybase64.b64encode_as_string(self.data))


@dataclass(frozen=True)
class ResponseEnd(ServerEvent):
    """response.done. Later prompts leave out what the prompt left out."""

    left_out: Sequence[Item]

    def apply(self, conversation: Conversation | None) -> dict[str, Any]:
        for item in self.left_out:
            item.is_forgotten = True
        return super().apply(conversation)
