"""Which parts of an arena are free."""

from bisect import bisect_left

# Of a cache line, and of every element type.
ALIGNMENT_BYTES = 64


class FreeRanges:
    """First-fit allocation in `size_bytes` bytes. Low offsets are used again first: their pages are in caches."""

    def __init__(self, size_bytes: int) -> None:
        self._free = [(0, size_bytes)]  # (offset, size) in bytes, ascending, no two of them adjacent

    def take(self, size_bytes: int) -> int | None:
        """Offset, a multiple of ALIGNMENT_BYTES, of `size_bytes` (>= 1) bytes; None if no range has as many."""
        size_bytes = aligned(size_bytes)
        for i, (offset, room) in enumerate(self._free):
            if room >= size_bytes:
                rest = [(offset + size_bytes, room - size_bytes)] if room > size_bytes else []
                self._free[i : i + 1] = rest
                return offset
        return None

    def give(self, offset: int, size_bytes: int) -> None:
        """Takes back what `take(size_bytes)` gave at `offset`."""
        size_bytes = aligned(size_bytes)
        i = bisect_left(self._free, (offset, 0))
        first, last = i, i
        if i < len(self._free) and self._free[i][0] == offset + size_bytes:
            size_bytes += self._free[i][1]
            last += 1
        if i and sum(self._free[i - 1]) == offset:
            first -= 1
            offset, size_bytes = self._free[first][0], self._free[first][1] + size_bytes
        self._free[first:last] = [(offset, size_bytes)]

    @property
    def free_bytes(self) -> int:
        """All that is free, in one range or many."""
        return sum(size for _, size in self._free)


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to what it takes of an arena."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
