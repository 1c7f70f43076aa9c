"""What sessions keep in memory, bounded in sum."""

from typing import Protocol
from weakref import WeakSet

FREE_BYTES = 256 * 1024  # of each


class Holder(Protocol):
    """What a session keeps. `size` is in bytes."""

    owner: str

    @property
    def size(self) -> int: ...


class HeldBySessions:
    """All of them have `most` bytes, apart from their first FREE_BYTES. An owner has at most as much as it leaves to
    others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._holders: WeakSet[Holder] = WeakSet()

    def has_room(self, holder: Holder, size: int) -> bool:
        """Whether `holder` may come to have `size` bytes."""
        self._holders.add(holder)
        sizes = {each: max(0, (size if each is holder else each.size) - FREE_BYTES) for each in self._holders}
        own = sum(bytes_ for each, bytes_ in sizes.items() if each.owner == holder.owner)
        return size <= FREE_BYTES or own <= self._most - sum(sizes.values())
