"""SQLite databases, on disk or in memory."""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import structlog

from gateway.errors import ApiError

Result = TypeVar("Result")
_RESERVED_BYTES = 8 * 1024 * 1024  # of disk, which deletions on a full one need
# An answered request outlives a power cut, and what was deleted is not in the file any more.
_PRAGMAS = ("synchronous = FULL", "secure_delete = ON", "journal_size_limit = 4194304")

log = structlog.get_logger()


class StoreError(Exception):
    """Says why the directory cannot be used, and what to do."""


class Store:
    """One database, opened by its first use or by `async with`. Every change is on disk when its call returns.

    Args:
        directory: made for its owner only. None: memory.

    Attributes:
        name: file name without .sqlite.
        setting: of the directory.
        migrations: by version of the schema, from 1, statements that lead to the next.
        pragmas: beside those of all stores.
    """

    name: ClassVar[str]
    setting: ClassVar[str]
    schema: ClassVar[str]
    migrations: ClassVar[Mapping[int, str]] = {}
    pragmas: ClassVar[tuple[str, ...]] = ()

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self.database: sqlite3.Connection
        self._thread = ThreadPoolExecutor(1, self.name)  # SQLite's one connection and thread
        self._opened: ExitStack | None = None

    @property
    def directory(self) -> Path:
        assert self._directory is not None, "it is in memory"
        return self._directory

    def check(self) -> None:
        """Blocking. Raises StoreError: the directory cannot be used, or the database is damaged."""
        self._open()
        try:
            (found,) = self.database.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.Error as error:
            found = str(error)
        self._close()
        if found != "ok":
            raise StoreError(f"{self.setting} {self._directory}: {self.name}.sqlite is damaged; move it away: {found}")

    async def __aenter__(self) -> Self:
        await self.run(self._open)
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    async def run(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Calls `call` in the database's thread. Raises StoreError."""

        def opened() -> Result:
            self._open()
            return call(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._thread, opened)

    async def write(self, statement: str, values: Any) -> None:
        def write() -> None:
            with self.database:
                self.database.execute(statement, values)

        await self.run(write)

    async def delete(self, statement: str, values: Any, *more: tuple[str, Any]) -> None:
        """Deletes rows, on a full disk, too; nothing of them stays in a log. `more` follows in the transaction."""
        statements = ((statement, values), *more)

        def delete() -> None:
            try:
                self._delete(statements)
            except sqlite3.OperationalError as error:
                if self._directory is None:
                    raise
                log.warning("deleting with the reserved room", store=self.name, error=str(error))
                self._reserve().unlink(missing_ok=True)
                self._delete_without_room(statements)

        await self.run(delete)

    def _delete(self, statements: Sequence[tuple[str, Any]]) -> None:
        with self.database:
            for statement, values in statements:
                self.database.execute(statement, values)
        self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _delete_without_room(self, statements: Sequence[tuple[str, Any]]) -> None:
        """Overwrites what it deletes if that fits, too."""
        self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        try:
            self._delete(statements)
        except sqlite3.OperationalError:
            self.database.execute("PRAGMA secure_delete = OFF")
            try:
                self._delete(statements)
            finally:
                self.database.execute("PRAGMA secure_delete = ON")

    def _reserve(self) -> Path:
        return self.directory / f"{self.name}.reserve"

    def _keep_reserve(self) -> None:
        """Takes room, until the store is opened again, that `delete` gives back when the disk is full."""
        try:
            with open(self._reserve(), "ab", opener=_private) as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)
        except OSError as error:
            log.warning("no room to reserve", store=self.name, error=str(error))

    async def rows(self, statement: str, values: tuple) -> list[tuple]:
        return await self.run(lambda: self.database.execute(statement, values).fetchall())

    def take(self, opened: ExitStack) -> None:
        """Claims the directory, before the database is opened; `opened` releases it."""

    def recover(self) -> None:
        """Ends what an earlier process left."""

    def _open(self) -> None:
        if self._opened is not None:
            return
        try:
            with ExitStack() as opened:
                if self._directory is not None:
                    self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                    self.take(opened)
                self.database = sqlite3.connect(self._file(), check_same_thread=False)
                opened.callback(self.database.close)
                self._upgrade()
                self.recover()
                if self._directory is not None:
                    self._keep_reserve()
                self._opened = opened.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{self.setting} {self._directory}: cannot be used: {error}") from None

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _file(self) -> Path | str:
        """The file, private to its owner."""
        if self._directory is None:
            return ":memory:"
        file = self.directory / f"{self.name}.sqlite"
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return file

    def _upgrade(self) -> None:
        for pragma in (*_PRAGMAS, *self.pragmas):
            self.database.execute(f"PRAGMA {pragma}")
        (version,) = self.database.execute("PRAGMA user_version").fetchone()
        while version in self.migrations:
            self.database.executescript(self.migrations[version])
            version += 1
        newest = 1 + len(self.migrations)
        if version == 0:
            self.database.executescript(self.schema)
        elif version != newest:
            raise StoreError(
                f"{self.setting} {self._directory}: written by another version of the gateway (format {version}, not "
                f"{newest}); use another directory"
            )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class ClientStore(Store):
    """A store whose errors clients get as a 500 that says `fault`."""

    fault: ClassVar[str]

    async def run(self, call: Callable[..., Result], *arguments: Any) -> Result:
        with store_errors(self.fault):
            return await super().run(call, *arguments)


def required(directory: Path | None, setting: str, what: str) -> Path:
    """Raises StoreError: there is no directory to keep `what` in."""
    if directory is None:
        option = setting.replace("_", "-")
        raise StoreError(f"{setting}: this user has no home directory to keep {what} in; name one with --{option}")
    return directory


@contextmanager
def store_errors(fault: str) -> Iterator[None]:
    """Turns a store's errors into a 500 that says `fault`."""
    try:
        yield
    except (StoreError, sqlite3.Error) as error:
        log.error(fault, error=str(error))
        raise ApiError(500, f"{fault} now; the gateway's log says why", None, "storage_failed") from error
