"""A SQLite database of one store: a file of a directory, or in memory."""

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import structlog
from sqlalchemy import Connection, MetaData, create_engine, event
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.pool import StaticPool

from gateway.store import migrations
from gateway.store.database import Call, Database
from gateway.store.errors import StoreError

Result = TypeVar("Result")
_BUSY_S = 5.0  # other processes write for milliseconds
_RESERVED_BYTES = 8 * 1024 * 1024  # of disk, which deletions on a full one need
# An answered request outlives a power cut, and what was deleted is not in the file any more.
_PRAGMAS = ("synchronous = FULL", "secure_delete = ON", "foreign_keys = ON", "journal_size_limit = 4194304")

log = structlog.get_logger()


class SqliteDatabase(Database):
    """One connection and one thread. Every change is on disk when its call returns.

    Args:
        directory: made for its owner only. None: memory.
        name: of the store, and of the file without .sqlite.
        setting: of the directory.
        pragmas: beside those of all.
    """

    def __init__(self, directory: Path | None, name: str, setting: str, pragmas: Sequence[str] = ()) -> None:
        super().__init__(f"{setting} {directory}", threads=1)
        self._directory, self._name, self._pragmas = directory, name, (*_PRAGMAS, *pragmas)

    @property
    def directory(self) -> Path:
        assert self._directory is not None, "it is in memory"
        return self._directory

    def open(self, name: str, tables: MetaData) -> None:
        try:
            place = "" if self._directory is None else f"/{self._file()}"
            self.engine = create_engine(
                f"sqlite://{place}",
                poolclass=StaticPool,
                hide_parameters=True,  # in errors, which are logged: clients said them
                connect_args={"check_same_thread": False, "timeout": _BUSY_S, "isolation_level": None},
            )
            event.listen(self.engine, "connect", self._set_up)
            event.listen(self.engine, "begin", _begin)
            if self._directory is None:
                tables.create_all(self.engine)
                return
            with self.transaction(writes=True) as connection:
                migrations.upgrade(connection, name, self.where)
            self._keep_reserve()
        except (OSError, DatabaseError, sqlite3.Error) as error:
            reason = error.orig if isinstance(error, DatabaseError) else error
            raise StoreError(f"{self.where}: cannot be used: {reason}") from None

    def check(self) -> None:
        try:
            with self.transaction(writes=False) as connection:
                found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        except DatabaseError as error:
            found = str(error.orig)
        if found != "ok":
            raise StoreError(f"{self.where}: {self._name}.sqlite is damaged; move it away: {found}")

    def lock(self, connection: Connection, name: str) -> None:
        """A transaction that writes is alone from its beginning."""

    def erase(self, call: Call[Result]) -> Result:
        """A transaction that deletes, on a full disk, too; nothing of what it deleted stays in a log."""
        try:
            return self._erase(call)
        except OperationalError as error:
            if self._directory is None:
                raise
            log.warning("deleting with the reserved room", store=self._name, error=str(error.orig))
            self._reserve().unlink(missing_ok=True)
            return self._erase_without_room(call)

    def _erase(self, call: Call[Result]) -> Result:
        result = super().erase(call)
        self._execute("wal_checkpoint(TRUNCATE)")
        return result

    def _erase_without_room(self, call: Call[Result]) -> Result:
        """Overwrites what it deletes if that fits, too."""
        self._execute("wal_checkpoint(TRUNCATE)")
        try:
            return self._erase(call)
        except OperationalError:
            self._execute("secure_delete = OFF")
            try:
                return self._erase(call)
            finally:
                self._execute("secure_delete = ON")

    def _execute(self, pragma: str) -> None:
        """Outside a transaction."""
        connection = self.engine.raw_connection()
        try:
            connection.cursor().execute(f"PRAGMA {pragma}").fetchall()
        finally:
            connection.close()

    def _set_up(self, connection: sqlite3.Connection, _: object) -> None:
        for pragma in self._pragmas:
            connection.execute(f"PRAGMA {pragma}")

    def _file(self) -> Path:
        """The file, private to its owner."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = file_of(self.directory.resolve(), self._name)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return file

    def _reserve(self) -> Path:
        return self.directory / f"{self._name}.reserve"

    def _keep_reserve(self) -> None:
        """Takes room, until the store is opened again, that `erase` gives back when the disk is full."""
        try:
            with open(self._reserve(), "ab", opener=_private) as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)
        except OSError as error:
            log.warning("no room to reserve", store=self._name, error=str(error))


def file_of(directory: Path, name: str) -> Path:
    """That of the store `name`."""
    return directory / f"{name}.sqlite"


def _begin(connection: Connection) -> None:
    """One that writes takes its lock at once: waiting for it later, after a read, would fail."""
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
