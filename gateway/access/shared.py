"""State that all workers share, in SQLite. Calls take 20 us: the event loop may make them."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BUSY_S = 10.0  # another process writes for microseconds
_SCHEMA = """
CREATE TABLE IF NOT EXISTS transcripts (audio_id TEXT PRIMARY KEY, expires_at INTEGER, transcript TEXT);
CREATE TABLE IF NOT EXISTS secrets (
    digest TEXT PRIMARY KEY, expires_at INTEGER, key_name TEXT, key_sha256 TEXT, session_json TEXT
);
CREATE TABLE IF NOT EXISTS running (key_name TEXT, worker INTEGER, requests INTEGER, PRIMARY KEY (key_name, worker));
CREATE TABLE IF NOT EXISTS admitted (key_name TEXT, at_s REAL);
CREATE INDEX IF NOT EXISTS admitted_of_key ON admitted (key_name, at_s);
"""


class SharedState:
    """The shared database; without a `file`, in memory. Forgets the running requests of the `worker` before."""

    def __init__(self, file: Path | None = None, worker: int = 0) -> None:
        self.worker = worker
        self._database = sqlite3.connect(
            ":memory:" if file is None else file, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        if file is not None:
            self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = OFF")  # nothing of it outlives the gateway
        with self.change() as database:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                database.execute(statement)
            database.execute("DELETE FROM running WHERE worker = ?", (worker,))

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """An exclusive transaction; an exception rolls it back."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield self._database
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def first(self, statement: str, *values: object) -> tuple | None:
        return self._database.execute(statement, values).fetchone()
