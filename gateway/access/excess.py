"""What gateways admitted beyond a key's rate before they knew of each other: it is of the minutes that follow.

So who asks all gateways at once gets more in that minute, and less in the next ones: on average the limit.
"""

import sqlite3
from collections.abc import Iterable, Mapping

from gateway.access.api_key import WINDOW_S, ApiKeyEntry
from gateway.access.key_usage import KeyUsage

_QUIET_S = 3.0  # after a move: the others' moves, of the same time, are known then
_UNSURE_S = 2.0  # by which a request of another gateway may seem to be later than it was
_LATER = (
    "UPDATE admitted SET at_s = at_s + ? WHERE rowid IN "
    "(SELECT rowid FROM admitted WHERE key_name = ? AND at_s <= ? ORDER BY at_s DESC LIMIT ?)"
)


class Excess:
    """Moves this gateway's part of it, in proportion to what it admitted. Less than one request of each stays."""

    def __init__(self) -> None:
        self._limits: dict[str, tuple[int, float]] = {}  # (of each key, since when)
        self._moved_at: dict[str, float] = {}

    def move(
        self,
        database: sqlite3.Connection,
        entries: Iterable[ApiKeyEntry],
        own: Mapping[str, KeyUsage],
        others: Mapping[str, KeyUsage],
        now: float,
    ) -> set[str]:
        """Returns the names of the keys whose requests it moved."""
        moved = set[str]()
        for entry in entries:
            most, name = entry.requests_per_minute, entry.name
            if most is None or not self._is_time(name, most, now) or name not in own or name not in others:
                continue
            here = _between(own[name], now - WINDOW_S, now)
            there = _between(others[name], now - WINDOW_S + _UNSURE_S, now)
            part = max(0, here + there - most) * here // max(1, here + there)
            if part and there:
                database.execute(_LATER, (WINDOW_S, name, now, part))
                self._moved_at[name] = now
                moved.add(name)
        return moved

    def _is_time(self, name: str, most: int, now: float) -> bool:
        """What was admitted by a higher limit than there is now is no excess."""
        before, since = self._limits.get(name, (most, now - WINDOW_S))
        if before != most:
            since = now
        self._limits[name] = most, since
        return now - since >= WINDOW_S and now - self._moved_at.get(name, now - _QUIET_S) >= _QUIET_S


def _between(usage: KeyUsage, begin_s: float, end_s: float) -> int:
    return sum(requests for at, requests in usage.admitted.items() if begin_s < at <= end_s)
