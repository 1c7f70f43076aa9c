"""One API key and the use of its limits."""

import asyncio
import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from gateway import metrics
from gateway.access import elsewhere
from gateway.access.shared import SharedState
from gateway.errors import ApiError, invalid
from gateway.validation import Strict

WINDOW_S = 60.0
SOUND_S = 60.0  # that count as one request
EMBEDDED_TOKENS = 32_768  # that count as one request
_RETRY_S = 1.0  # nobody knows when a slot will be free
_RETRY_ELSEWHERE_S = 2.0  # until this gateway knows of one that came free at another
_ONE_MORE = "INSERT INTO running VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET requests = requests + 1"
_ONE_LESS = "UPDATE running SET requests = requests - 1 WHERE key_name = ? AND worker = ?"
_MAX_REQUESTS_PER_MINUTE = 100_000  # the time of each is remembered for a minute


class ApiKeyEntry(Strict):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = Field(
        description="in logs and metrics; letters, digits and . _ -"
    )
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] = Field(
        description="of the whole key, hexadecimal, as `quartet key` prints it"
    )
    max_concurrent_requests: int | None = Field(None, ge=1, description="requests at a time; default: no limit")
    requests_per_minute: int | None = Field(
        None, ge=1, le=_MAX_REQUESTS_PER_MINUTE, description="in any 60 seconds; default: no limit"
    )
    max_realtime_sessions: int | None = Field(
        None, ge=0, description="WebSockets of realtime and Responses at a time; default: a quarter of the server's"
    )
    admin: bool = Field(False, description="may load and unload adapters and take profiles; default: no")


def key_gone() -> ApiError:
    reason = "the API key of this connection is not known here any more; connect again with another one"
    return ApiError(401, reason, None, "invalid_api_key")


def sessions_name(key_name: str) -> str:
    """By which its sessions are counted: no key's name has a slash."""
    return f"{key_name}/sessions"


class _NoneIsFree(Exception):
    """All places of a key are taken."""


class ApiKey:
    """A key and the use of its limits. `entry` is the file's current one; `is_gone`: the file has no more of it.

    Attributes:
        tasks: that are cancelled when it is gone.
    """

    def __init__(self, entry: ApiKeyEntry, shared: SharedState | None = None) -> None:
        self.entry, self.name, self.is_gone = entry, entry.name, False
        self.tasks = set[asyncio.Task[Any]]()
        self._shared = shared or SharedState()
        self._running_metric = metrics.KEY_RUNNING.labels(self.name)

    @contextmanager
    def request(self) -> Iterator[ExitStack]:
        """Holds a slot of the key; `pop_all` takes it along for work that outlives the request.

        Raises:
            ApiError: 429, a limit of the key is reached; 401, an open connection has a key that is gone.
        """
        if self.is_gone:
            raise key_gone()
        with self._place(self._check_concurrency, self._check_rate) as place:
            metrics.KEY_REQUESTS.labels(self.name).inc()
            yield place

    def end(self) -> None:
        """Ends what it has begun."""
        self.is_gone = True
        for task in list(self.tasks):
            task.cancel()

    @contextmanager
    def session(self, most: int) -> Iterator[None]:
        """Holds a connection that may stay open for long. Raises ApiError: 429, the entry's limit, or `most` here."""
        limit, name = self.entry.max_realtime_sessions, sessions_name(self.name)
        with self._shared.change() as database:
            others = 0 if limit is None else elsewhere.sessions(database, self.name, self._shared.now())
            if (open_now := self._count(database, name) + others) >= (most if limit is None else limit):
                reason = f"has {open_now} sessions, as many as it may"
                raise self._refusal("sessions", reason, _RETRY_ELSEWHERE_S if others else _RETRY_S)
            database.execute(_ONE_MORE, (name, self._shared.worker))
        try:
            yield
        finally:
            self._shared.settle(_ONE_LESS, name, self._shared.worker)

    def hold(self) -> Callable[[], None]:
        """Takes another slot for an admitted request's work; the returned function frees it."""
        return self._place().close

    def one_more(self) -> ExitStack | None:
        """Another place for an admitted request's work, which closing it gives back. None: none is free."""

        def check(database: sqlite3.Connection) -> None:
            most = self.entry.max_concurrent_requests
            if self.is_gone or (most is not None and sum(self._running(database)) >= most):
                raise _NoneIsFree

        try:
            return self._place(check)
        except _NoneIsFree:
            return None

    def count(self) -> None:
        """Counts a request that takes no place. Raises ApiError: 429, it is one too many a minute."""
        with self._shared.change() as database:
            self._check_rate(database)

    @contextmanager
    def at_once(self, more: int, field: str) -> Iterator[None]:
        """Holds `more` places for an admitted request's work that is not divided.

        Raises:
            ApiError: 429, so many are not free; 400 naming `field`: the key never has so many.
        """
        if more < 1:
            yield
            return
        self._check_possible(more, self.entry.max_concurrent_requests, field, "at a time")
        with ExitStack() as places:
            for _ in range(more):
                places.push(self._place(self._check_concurrency))
            yield

    def charge(self, more: int, field: str) -> None:
        """Takes `more` of the rate for an admitted request.

        Raises:
            ApiError: 429, not so much is left; 400 naming `field`: the key never has so much.
        """
        if more > 0:
            self._check_possible(more, self.entry.requests_per_minute, field, "a minute")
            with self._shared.change() as database:
                self._check_rate(database, more)

    def refund(self) -> None:
        """Gives back what a request took of the rate."""
        newest = "SELECT rowid FROM admitted WHERE key_name = ? ORDER BY at_s DESC LIMIT 1"
        self._shared.settle(f"DELETE FROM admitted WHERE rowid = ({newest})", self.name)

    def _check_possible(self, more: int, most: int | None, field: str, when: str) -> None:
        """Raises ApiError: 400, a request with `more` than one could never be admitted."""
        if most is not None and more + 1 > most:
            reason = f"{more + 1} answers are too many for the API key {self.name!r}, which may have {most} {when}"
            raise invalid(field, f"{reason}; ask for fewer", "rate_limit_exceeded")

    def owe(self, seconds: float) -> None:
        """Counts sound that was heard or made: each begun minute beyond the first is a request."""
        self._owe_requests(seconds / SOUND_S)

    def owe_tokens(self, tokens: int) -> None:
        """Counts tokens that embeddings were made of: each begun `EMBEDDED_TOKENS` beyond the first are a request."""
        self._owe_requests(tokens / EMBEDDED_TOKENS)

    def _owe_requests(self, requests: float) -> None:
        """Takes of the minutes that follow what this one does not have."""
        most, now, more = self.entry.requests_per_minute, self._shared.now(), math.ceil(requests) - 1
        if most is None or more < 1:
            return
        with self._shared.change() as database:
            (used,) = database.execute("SELECT count(*) FROM admitted WHERE key_name = ?", (self.name,)).fetchone()
            used += sum(count for _, count in elsewhere.admitted(database, self.name, now - WINDOW_S))
            rows = [(self.name, now + (used + i) // most * WINDOW_S) for i in range(more)]
            database.executemany("INSERT INTO admitted VALUES (?, ?)", rows)

    def _place(self, *checks: Callable[[sqlite3.Connection], None]) -> ExitStack:
        """Counts a request in if `checks` allow it; closing the result counts it out."""
        with self._shared.change() as database:
            for check in checks:
                check(database)
            database.execute(_ONE_MORE, (self.name, self._shared.worker))
        self._running_metric.inc()
        place = ExitStack()
        place.callback(self._give_back)
        return place

    def _give_back(self) -> None:
        self._running_metric.dec()
        self._shared.settle(_ONE_LESS, self.name, self._shared.worker)

    def _check_concurrency(self, database: sqlite3.Connection) -> None:
        most = self.entry.max_concurrent_requests
        if most is None:
            return
        here, others = self._running(database)
        if here + others >= most:
            reason = f"has {here + others} requests in progress; it may have {most} at a time"
            raise self._refusal("concurrency", reason, _RETRY_ELSEWHERE_S if others else _RETRY_S)

    def _running(self, database: sqlite3.Connection) -> tuple[int, int]:
        """Requests (here, at other gateways)."""
        return self._count(database, self.name), elsewhere.running(database, self.name, self._shared.now())

    def _count(self, database: sqlite3.Connection, name: str) -> int:
        total = "SELECT coalesce(sum(requests), 0) FROM running WHERE key_name = ?"
        return database.execute(total, (name,)).fetchone()[0]

    def _check_rate(self, database: sqlite3.Connection, count: int = 1) -> None:
        """Counts `count` requests, too."""
        most, now = self.entry.requests_per_minute, self._shared.now()
        begin = math.inf if most is None else now - WINDOW_S
        database.execute("DELETE FROM admitted WHERE key_name = ? AND at_s <= ?", (self.name, begin))
        if most is None:
            return
        # after the limit was lowered, several requests must age first
        others = elsewhere.admitted(database, self.name, begin)
        if (blocking := elsewhere.nth_newest(database, self.name, max(0, most - count), others)) is not None:
            raise self._refusal("rate", f"may make {most} requests a minute", blocking + WINDOW_S - now)
        database.executemany("INSERT INTO admitted VALUES (?, ?)", [(self.name, now)] * count)

    def _refusal(self, which: str, reason: str, retry_after_s: float) -> ApiError:
        metrics.KEY_REFUSED.labels(self.name, which).inc()
        message = f"the API key {self.name!r} {reason}; retry later"
        return ApiError(429, message, None, "rate_limit_exceeded", "rate_limit_error", math.ceil(retry_after_s))
