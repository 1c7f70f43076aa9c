"""The conversation of a session."""

from dataclasses import dataclass

from gateway.dialects.realtime.conversation.items import Item
from gateway.dialects.realtime.conversation.truncation import truncate
from gateway.dialects.realtime.events import RealtimeError, new_id

ROOT = "root"  # as previous_item_id: before all others


@dataclass(frozen=True)
class ConversationLimits:
    items: int = 1000
    size_bytes: int = 256 * 1024 * 1024


class Conversation:
    """Items in order, with unique ids."""

    def __init__(self, limits: ConversationLimits | None = None) -> None:
        self.id = new_id("conv")
        self._limits = limits or ConversationLimits()
        self._items: list[Item] = []
        self._by_id: dict[str, Item] = {}
        self._sizes: dict[str, int] = {}  # in bytes, when they were added

    def context(self) -> list[Item]:
        return [item for item in self._items if not item.is_forgotten]

    def find(self, id: str) -> Item | None:
        return self._by_id.get(id)

    def previous_id(self, id: str) -> str | None:
        """Id of the item before `id`; None: `id` is the first."""
        index = self._items.index(self._by_id[id])
        return self._items[index - 1].id if index else None

    def add(self, item: Item, after: str | None = None, makes_room: bool = False) -> str | None:
        """Adds an item and returns the id of the item before it.

        Args:
            item: has a new id.
            after: id of the item before, or "root"; None: the item is the last.
            makes_room: drops the oldest items when there are too many.

        Raises:
            RealtimeError: the id is not new, `after` is unknown, or the conversation is full.
        """
        if item.id in self._by_id:
            message = f"item.id: the conversation has an item {item.id!r} already"
            raise RealtimeError("item_create_duplicate_item_id", message, "item.id")
        self.check_place(after)
        while makes_room and len(self._items) >= self._limits.items:
            self.delete(self._items[0].id)
        self._check_room(item)
        if after is None:
            self._items.append(item)
        else:
            self._items.insert(0 if after == ROOT else self._items.index(self._by_id[after]) + 1, item)
        self._by_id[item.id] = item
        self._sizes[item.id] = item.size_bytes
        return self.previous_id(item.id)

    def has_grown(self, item: Item) -> None:
        if item.id in self._sizes:
            self._sizes[item.id] = item.size_bytes

    def check_place(self, after: str | None) -> None:
        if after not in (None, ROOT) and after not in self._by_id:
            message = f"previous_item_id: no item {after!r} is in the conversation"
            raise RealtimeError("item_create_invalid_previous_item_id", message, "previous_item_id")

    def _check_room(self, item: Item) -> None:
        if len(self._items) >= self._limits.items:
            reason = f"the conversation has {self._limits.items} items, its most; delete some"
            raise RealtimeError("conversation_too_long", reason)
        if sum(self._sizes.values()) + item.size_bytes > self._limits.size_bytes:
            reason = f"the conversation would be larger than {self._limits.size_bytes} bytes; delete items of sound"
            raise RealtimeError("conversation_too_long", reason)

    def retrieve(self, id: str) -> Item:
        """Raises RealtimeError: there is no such item."""
        return self._require(id, "retrieve")

    def delete(self, id: str) -> None:
        """Raises RealtimeError: there is no such item."""
        item = self._require(id, "delete")
        self._items.remove(item)
        del self._by_id[id], self._sizes[id]

    def clear(self) -> None:
        self._items.clear()
        self._by_id.clear()
        self._sizes.clear()

    def truncate(self, id: str, content_index: int, audio_end_ms: int) -> None:
        """Cuts an assistant's message to what the user heard. Raises RealtimeError: it has less sound, or none."""
        item = self._require(id, "truncate")
        if item.role != "assistant":
            raise RealtimeError("invalid_value", "item_id: only the assistant's messages can be cut", "item_id")
        parts = item.content
        if not 0 <= content_index < len(parts) or parts[content_index]["type"] != "output_audio":
            reason = f"content_index: the item has no sound at {content_index}"
            raise RealtimeError("invalid_value", reason, "content_index")
        if not 0 <= audio_end_ms <= item.sent_ms:
            reason = f"audio_end_ms: {audio_end_ms} ms is not within the {item.sent_ms} ms of sound that were sent"
            raise RealtimeError("invalid_value", reason, "audio_end_ms")
        truncate(item, content_index, audio_end_ms)

    def _require(self, id: str, what: str) -> Item:
        item = self._by_id.get(id)
        if item is None:
            message = f"item_id: no item {id!r} is in the conversation"
            raise RealtimeError(f"item_{what}_invalid_item_id", message, "item_id")
        return item
