"""What this gateway uses of the limits of its keys."""

import asyncio
from collections.abc import Iterable

from gateway.access.api_key import WINDOW_S, ApiKeyEntry, sessions_name
from gateway.access.key_usage import KeyUsage
from gateway.access.shared import SharedState

_AT_ONCE = 50  # keys: a millisecond
_AGAIN_S = 2  # that are counted again: a request gives back what it took a moment ago
_BY_SECOND = (
    "SELECT CAST(at_s AS INTEGER) AS second, count(*) FROM admitted WHERE key_name = ? AND at_s >= ? GROUP BY second"
)


class OwnUsage:
    """Counts what all workers of this gateway admit. It reads the last seconds only, and lets the event loop go on."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self._admitted: dict[str, dict[int, int]] = {}
        self._counted_to = 0

    def forget(self, names: Iterable[str]) -> None:
        """All requests of these keys are counted again."""
        for name in names:
            self._admitted.pop(name, None)

    async def read(self, entries: Iterable[ApiKeyEntry]) -> dict[str, KeyUsage]:
        """The keys that have limits and are used, by name."""
        now = self._shared.now()
        first = int(now - WINDOW_S) + 1  # the second that ends the minute is nearly over
        counted = self._shared.every("SELECT key_name, sum(requests) FROM running GROUP BY key_name")
        running, found = dict(counted), dict[str, KeyUsage]()
        for number, entry in enumerate(entries):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            usage = KeyUsage(
                running.get(entry.name, 0) if entry.max_concurrent_requests is not None else 0,
                running.get(sessions_name(entry.name), 0) if entry.max_realtime_sessions is not None else 0,
                self._count(entry.name, first) if entry.requests_per_minute is not None else {},
            )
            if usage != KeyUsage():
                found[entry.name] = usage
        self._admitted = {name: dict(usage.admitted) for name, usage in found.items()}
        self._counted_to = int(now)
        return found

    def _count(self, name: str, first: int) -> dict[int, int]:
        known = self._admitted.get(name)
        if known is None:
            return dict(self._shared.every(_BY_SECOND, name, first))
        again = max(first, self._counted_to - _AGAIN_S)
        before = {second: requests for second, requests in known.items() if first <= second < again}
        return before | dict(self._shared.every(_BY_SECOND, name, again))
