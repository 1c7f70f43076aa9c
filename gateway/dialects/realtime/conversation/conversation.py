"""The conversation of a session."""

from gateway.access.sessions import HeldBySessions
from gateway.dialects.realtime.conversation.items import Item
from gateway.dialects.realtime.conversation.truncation import truncate
from gateway.dialects.realtime.events import RealtimeError, new_id, wrong
from gateway.settings import MIB

ROOT = "root"  # as previous_item_id: before all others


class Conversation:
    """Items in order, with unique ids.

    Args:
        held: by all sessions; None: they are not bounded in sum.
        owner: of the session.
    """

    def __init__(
        self,
        max_items: int = 1000,
        max_bytes: int = 256 * MIB,
        held: HeldBySessions | None = None,
        owner: str | None = None,
    ) -> None:
        self.id, self._max_items, self._max_bytes = new_id("conv"), max_items, max_bytes
        self._held, self.owner = held, owner or ""
        self._items: dict[str, Item] = {}  # by id
        self._sizes: dict[str, int] = {}  # in bytes, when they were added

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(self._sizes.values())

    def context(self) -> list[Item]:
        return [item for item in self._items.values() if not item.is_forgotten]

    def find(self, id: str) -> Item | None:
        return self._items.get(id)

    def previous_id(self, id: str) -> str | None:
        """Id of the item before; None: `id` is the first."""
        ids = list(self._items)
        index = ids.index(id)
        return ids[index - 1] if index else None

    def add(self, item: Item, after: str | None = None, makes_room: bool = False) -> str | None:
        """Adds an item after the item `after`, first for "root", or last. Returns the id of the item before it.

        Args:
            makes_room: drops the oldest items when there are too many.

        Raises:
            RealtimeError: the item's id is not new, `after` is unknown, or the conversation is full.
        """
        if item.id in self._items:
            reason = f"the conversation has an item {item.id!r} already"
            raise wrong("item.id", reason, "item_create_duplicate_item_id")
        self.check_place(after)
        while makes_room and len(self._items) >= self._max_items:
            self.delete(next(iter(self._items)))
        self._check_room(item)
        self._items[item.id] = item
        if after is not None:
            *ids, last = self._items
            ids.insert(0 if after == ROOT else ids.index(after) + 1, last)
            self._items = {id: self._items[id] for id in ids}
        self._sizes[item.id] = item.size_bytes
        return self.previous_id(item.id)

    def has_grown(self, item: Item) -> None:
        if item.id in self._sizes:
            self._sizes[item.id] = item.size_bytes

    def check_place(self, after: str | None) -> None:
        if after not in (None, ROOT) and after not in self._items:
            reason = f"no item {after!r} is in the conversation"
            raise wrong("previous_item_id", reason, "item_create_invalid_previous_item_id")

    def _check_room(self, item: Item) -> None:
        if len(self._items) >= self._max_items:
            reason = f"the conversation has {self._max_items} items, its most; delete some"
            raise RealtimeError("conversation_too_long", reason)
        if (size := self.size + item.size_bytes) > self._max_bytes:
            reason = f"the conversation would be larger than {self._max_bytes} bytes; delete items of sound"
            raise RealtimeError("conversation_too_long", reason)
        if self._held is not None and not self._held.has_room(self, size):
            reason = "your conversations would leave too little memory to those of others; delete items of sound"
            raise RealtimeError("conversation_too_long", reason)

    def delete(self, id: str) -> None:
        """Raises RealtimeError: there is no such item."""
        self.require(id, "delete")
        del self._items[id], self._sizes[id]

    def clear(self) -> None:
        self._items.clear()
        self._sizes.clear()

    def truncate(self, id: str, content_index: int, audio_end_ms: int) -> None:
        """Cuts an assistant's message to what the user heard. Raises RealtimeError: it has less sound, or none."""
        item = self.require(id, "truncate")
        if item.role != "assistant":
            raise wrong("item_id", "only the assistant's messages can be cut")
        parts = item.content
        if not 0 <= content_index < len(parts) or parts[content_index]["type"] != "output_audio":
            raise wrong("content_index", f"the item has no sound at {content_index}")
        if not 0 <= audio_end_ms <= item.sent_ms:
            reason = f"{audio_end_ms} ms is not within the {item.sent_ms} ms of sound that were sent"
            raise wrong("audio_end_ms", reason)
        truncate(item, content_index, audio_end_ms)

    def require(self, id: str, what: str) -> Item:
        """The item to `what`: "retrieve", "delete" or "truncate". Raises RealtimeError: there is none."""
        item = self._items.get(id)
        if item is None:
            raise wrong("item_id", f"no item {id!r} is in the conversation", f"item_{what}_invalid_item_id")
        return item
