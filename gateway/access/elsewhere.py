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

_PUT = "INSERT OR REPLACE INTO elsewhere VALUES (?, ?, ?, ?, 0)"
_OWN_AT = "SELECT at_s FROM admitted WHERE key_name = ? ORDER BY at_s DESC LIMIT 1 OFFSET ?"
_OWN_SINCE = "SELECT count(*) FROM admitted WHERE key_name = ? AND at_s >= ?"


def replace(database: sqlite3.Connection, usages: Mapping[str, KeyUsage], until_s: float) -> None:
    """Puts what others use in the place of what was known; requests and sessions that run count until `until_s`."""
    rows = {name: (name, usage.running, usage.sessions, _text(usage)) for name, usage in usages.items()}
    known = database.execute("SELECT key_name, running, sessions, admitted FROM elsewhere").fetchall()
    database.executemany("DELETE FROM elsewhere WHERE key_name = ?", [row[:1] for row in known if row[0] not in rows])
    before = {row[0]: row for row in known}
    database.executemany(_PUT, [row for name, row in rows.items() if before.get(name) != row])
    database.execute("UPDATE elsewhere SET until_s = ?", (until_s,))


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
