"""What other gateways use of keys' limits, in the shared state: all workers of this gateway count it.

Functions take a transaction of the shared state, or its database.
"""

import json
import sqlite3
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

from gateway.access.key_usage import KeyUsage

Bucket = tuple[int, int]
"""(second of this machine's clock, requests admitted in it)."""

_PUT = (
    "INSERT INTO elsewhere VALUES (?, ?, ?, ?, 0) ON CONFLICT DO UPDATE SET "
    "running = excluded.running, sessions = excluded.sessions, admitted = excluded.admitted"
)
_OWN_AT = "SELECT at_s FROM admitted WHERE key_name = ? ORDER BY at_s DESC LIMIT 1 OFFSET ?"
_OWN_SINCE = "SELECT count(*) FROM admitted WHERE key_name = ? AND at_s >= ?"


def put(database: sqlite3.Connection, usages: Mapping[str, KeyUsage]) -> None:
    """Puts what others use of these keys in the place of what was known of them."""
    rows = [(name, usage.running, usage.sessions, _text(usage)) for name, usage in usages.items()]
    database.executemany(_PUT, rows)


def prolong(database: sqlite3.Connection, until_s: float) -> None:
    """What runs at others counts until then. Keys without any use are forgotten."""
    database.execute("UPDATE elsewhere SET until_s = ?", (until_s,))
    database.execute("DELETE FROM elsewhere WHERE running = 0 AND sessions = 0 AND admitted = '[]'")


def names(database: sqlite3.Connection) -> set[str]:
    """Of all keys that others use."""
    return {name for (name,) in database.execute("SELECT key_name FROM elsewhere")}


def running(database: sqlite3.Connection, key_name: str, now: float) -> int:
    return _of(database, "running", key_name, now)


def sessions(database: sqlite3.Connection, key_name: str, now: float) -> int:
    return _of(database, "sessions", key_name, now)


def _of(database: sqlite3.Connection, column: str, key_name: str, now: float) -> int:
    found = f"SELECT {column} FROM elsewhere WHERE key_name = ? AND until_s > ?"
    row = database.execute(found, (key_name, now)).fetchone()
    return 0 if row is None else row[0]


def admitted(database: sqlite3.Connection, key_name: str, after_s: float) -> list[Bucket]:
    """Requests of others, newest first. They count until they are a minute old, whatever has become of the others."""
    row = database.execute("SELECT admitted FROM elsewhere WHERE key_name = ?", (key_name,)).fetchone()
    return [] if row is None else [(at, requests) for at, requests in json.loads(row[0]) if at > after_s]


def nth_newest(database: sqlite3.Connection, key_name: str, rank: int, others: list[Bucket]) -> float | None:
    """When the request was admitted that `rank` ones follow, here or in `others`. None: there are not so many."""

    def own(rank: int) -> float | None:
        row = database.execute(_OWN_AT, (key_name, rank)).fetchone()
        return None if row is None else row[0]

    def own_since(at_s: float) -> int:
        return database.execute(_OWN_SINCE, (key_name, at_s)).fetchone()[0]

    newer = [0, *accumulate(requests for _, requests in others)]  # of others, than each bucket

    def reaches(bucket: int) -> bool:
        """Whether it has more than `rank` requests, with all newer ones."""
        return own_since(others[bucket][0]) + newer[bucket + 1] > rank

    reached = bisect_left(range(len(others)), True, key=reaches)
    of_own = own(rank - newer[reached])
    return of_own if reached == len(others) else max(others[reached][0], of_own or 0.0)


def _text(usage: KeyUsage) -> str:
    return json.dumps(sorted(usage.admitted.items(), reverse=True), separators=(",", ":"))
