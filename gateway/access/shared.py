"""State that all workers share, in SQLite. Calls take 20 us: the event loop may make them."""

import asyncio
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from gateway.errors import ApiError

_BUSY_S = 10.0  # another process writes for microseconds
_AGAIN_S = 1.0  # after a change that had to wait
_RESERVED_BYTES = 2 * 1024 * 1024  # of the file and of its log, twice what is written between two checkpoints
_CHECKPOINT_PAGES = 256  # of 4 KiB
_SCHEMA = """
CREATE TABLE IF NOT EXISTS transcripts (audio_id TEXT PRIMARY KEY, expires_at INTEGER, transcript TEXT);
CREATE TABLE IF NOT EXISTS secrets (
    digest TEXT PRIMARY KEY, expires_at INTEGER, key_name TEXT, session_json BLOB
);
CREATE TABLE IF NOT EXISTS kept (name TEXT PRIMARY KEY, value BLOB);
CREATE TABLE IF NOT EXISTS running (key_name TEXT, worker INTEGER, requests INTEGER, PRIMARY KEY (key_name, worker));
CREATE TABLE IF NOT EXISTS admitted (key_name TEXT, at_s REAL);
CREATE INDEX IF NOT EXISTS admitted_of_key ON admitted (key_name, at_s);
CREATE TABLE IF NOT EXISTS elsewhere (
    key_name TEXT PRIMARY KEY, running INTEGER, sessions INTEGER, admitted TEXT, until_s REAL
);
CREATE TABLE IF NOT EXISTS gateway (name TEXT);
CREATE TABLE IF NOT EXISTS videos (place INTEGER PRIMARY KEY, video TEXT UNIQUE, worker INTEGER);
CREATE TABLE IF NOT EXISTS generations (digest BLOB PRIMARY KEY, worker INTEGER);
"""
_UNDER_WAY = ("running", "videos", "generations")  # what ends with its worker

log = structlog.get_logger()


class SharedState:
    """The shared database; without a `file`, in memory. Forgets what the `worker` before had under way.

    Its file has room from the beginning, so that counts change on a full disk, too.

    Args:
        now: seconds of a clock that all workers have.
    """

    def __init__(
        self, file: Path | None = None, worker: int = 0, now: Callable[[], float] = lambda: time.monotonic()
    ) -> None:
        self.worker, self.now = worker, now
        self._database = sqlite3.connect(
            ":memory:" if file is None else file, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        if file is not None:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        self._database.execute("PRAGMA synchronous = OFF")  # nothing of it outlives the gateway
        self._database.execute("PRAGMA temp_store = MEMORY")
        self._waiting = list[tuple[str, tuple]]()  # changes that are made later
        with self.change() as database:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                database.execute(statement)
            for table in _UNDER_WAY:
                database.execute(f"DELETE FROM {table} WHERE worker = ?", (worker,))
            named = "INSERT INTO gateway SELECT ? WHERE NOT EXISTS (SELECT * FROM gateway)"
            database.execute(named, (uuid.uuid4().hex,))
        if file is not None:
            self._reserve()

    def _reserve(self) -> None:
        """Makes room in the file and its log."""
        with self.change() as database:
            database.execute("CREATE TABLE IF NOT EXISTS room (bytes BLOB)")
            database.execute("INSERT INTO room VALUES (zeroblob(?))", (_RESERVED_BYTES,))
        with self.change() as database:
            database.execute("DELETE FROM room")
        with suppress(sqlite3.OperationalError):  # another process does it now
            self._database.execute("PRAGMA wal_checkpoint(PASSIVE)")

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """An exclusive transaction; an exception rolls it back.

        Raises:
            ApiError: 503, there is no room for the change, or another process takes too long.
        """
        try:
            self._settle()
            with self._transaction() as database:
                yield database
        except sqlite3.OperationalError as error:
            log.error("shared state cannot be written", error=str(error))
            message = "this server has no room to count requests now; try again"
            raise ApiError(503, message, None, "storage_failed", retry_after_s=_AGAIN_S) from error

    def keep(self, name: str, value: bytes) -> bytes:
        """What the first worker to name this has kept: `value`, if there is nothing yet. Raises ApiError: 503."""
        with self.change() as database:
            database.execute("INSERT OR IGNORE INTO kept VALUES (?, ?)", (name, value))
            (kept,) = database.execute("SELECT value FROM kept WHERE name = ?", (name,)).fetchone()
        return kept

    def settle(self, statement: str, *values: object) -> None:
        """Makes a change that must not be lost: where it is impossible now, before the next one, or after a second."""
        self._waiting.append((statement, values))
        try:
            self._settle()
        except sqlite3.Error as error:
            log.error("shared state cannot be written", error=str(error), waiting=len(self._waiting))
            with suppress(RuntimeError):  # no event loop: the next change is the time
                asyncio.get_running_loop().call_later(_AGAIN_S, self._settle_later)

    def _settle_later(self) -> None:
        with suppress(sqlite3.Error):
            self._settle()
        if self._waiting:
            asyncio.get_running_loop().call_later(_AGAIN_S, self._settle_later)

    def _settle(self) -> None:
        """Raises sqlite3.Error; what waits goes on waiting."""
        if self._waiting:
            with self._transaction() as database:
                for statement, values in self._waiting:
                    database.execute(statement, values)
            self._waiting.clear()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Raises sqlite3.Error."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield self._database
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:  # SQLite itself ends one that finds no room
                self._database.execute("ROLLBACK")
            raise

    @property
    def gateway(self) -> str:
        """A name that no other gateway ever has, and all workers of this one until it ends."""
        return self.every("SELECT name FROM gateway")[0][0]

    def every(self, statement: str, *values: object) -> list[tuple]:
        return self._database.execute(statement, values).fetchall()

    def first(self, statement: str, *values: object) -> tuple | None:
        return self._database.execute(statement, values).fetchone()
