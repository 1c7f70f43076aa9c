"""What a key's requests take of its limits."""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gateway import metrics
from gateway.access.key_file import ApiKeyEntry
from gateway.openai.errors import ApiError

LIMITS = ("concurrency", "rate")
_WINDOW_S = 60.0
_RETRY_S = 1.0  # when a place will be free is not known


class Place:
    """A request's place among those that its key may have at a time.

    Attributes:
        kept: whether it is held beyond the request, by what the request started.
    """

    def __init__(self, usage: "Usage") -> None:
        self.kept = False
        self._usage: Usage | None = usage

    def release(self) -> None:
        """The place is free. May be called again."""
        if self._usage is not None:
            self._usage.release()
            self._usage = None


class Usage:
    """The requests of the key `name`, whatever its entry becomes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._running = 0
        self._admitted_s: deque[float] = deque()
        self._running_metric = metrics.KEY_RUNNING.labels(name)

    @contextmanager
    def request(self, entry: ApiKeyEntry) -> Iterator[Place]:
        """While a request is served, or for longer if its place is kept.

        Raises:
            ApiError: 429, a limit of `entry` is reached.
        """
        self._check_concurrency(entry)
        self._check_rate(entry)
        metrics.KEY_REQUESTS.labels(self.name).inc()
        self._running += 1
        self._running_metric.inc()
        place = Place(self)
        try:
            yield place
        finally:
            if not place.kept:
                place.release()

    def release(self) -> None:
        """For Place."""
        self._running -= 1
        self._running_metric.dec()

    def forget(self) -> None:
        """Removes the key's name from the metrics."""
        metrics.KEY_RUNNING.remove(self.name)
        for metric, labels in ((metrics.KEY_REQUESTS, ()), *((metrics.KEY_REFUSED, (which,)) for which in LIMITS)):
            with suppress(KeyError):
                metric.remove(self.name, *labels)

    def _check_concurrency(self, entry: ApiKeyEntry) -> None:
        most = entry.max_concurrent_requests
        if most is not None and self._running >= most:
            reason = f"has {self._running} requests in progress; it may have {most} at a time"
            raise self._refusal("concurrency", reason, _RETRY_S)

    def _check_rate(self, entry: ApiKeyEntry) -> None:
        """Counts the request if it may be made."""
        most, now = entry.requests_per_minute, time.monotonic()
        if most is None:
            self._admitted_s.clear()
            return
        while self._admitted_s and self._admitted_s[0] <= now - _WINDOW_S:
            self._admitted_s.popleft()
        if len(self._admitted_s) >= most:
            # of a limit that was lowered, more than one has to become old
            wait_s = self._admitted_s[-most] + _WINDOW_S - now
            raise self._refusal("rate", f"may make {most} requests a minute", wait_s)
        self._admitted_s.append(now)

    def _refusal(self, which: str, reason: str, retry_after_s: float) -> ApiError:
        metrics.KEY_REFUSED.labels(self.name, which).inc()
        message = f"the API key {self.name!r} {reason}; retry later"
        return ApiError(429, message, None, "rate_limit_exceeded", "rate_limit_error", math.ceil(retry_after_s))
