"""A database whose calls run in threads of its own: an event loop never waits for it.

Statements are SQLAlchemy's, so that each is written once for SQLite and PostgreSQL. Its synchronous half is used: a
transaction runs whole in one thread, and a client that leaves in its middle ends it nowhere in between.
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import Connection, Engine, MetaData

Result = TypeVar("Result")
Call = Callable[[Connection], Result]


class Database(ABC):
    """Opened by its first use. Methods are blocking, but for `run`.

    Args:
        where: the setting and its value, for errors; without a password.
        threads: calls at a time.

    Attributes:
        engine: SQLAlchemy's; from its first use on.
    """

    engine: Engine

    def __init__(self, where: str, threads: int) -> None:
        self.where = where
        self._executor = ThreadPoolExecutor(threads, "store")
        self._preparing, self._prepared = threading.Lock(), set[str]()

    async def run(self, call: Callable[[], Result]) -> Result:
        """Calls `call` in a thread of the database's. A cancellation does not stop it."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def shutdown(self) -> None:
        """Closes it for good."""
        await self.run(self.close)
        self._executor.shutdown()

    def prepare(self, name: str, tables: MetaData, recover: Call[None]) -> None:
        """Has the newest schema of the store `name`. The first time, `recover` follows.

        Raises:
            StoreError: the database cannot be used.
        """
        with self._preparing:
            if name not in self._prepared:
                self.open(name, tables)
                with self.transaction(writes=True) as connection:
                    recover(connection)
                self._prepared.add(name)

    def close(self) -> None:
        """Until its next use."""
        with self._preparing:
            if self._prepared:
                self.engine.dispose()
                self._prepared.clear()

    @contextmanager
    def transaction(self, writes: bool) -> Iterator[Connection]:
        """Commits at the end of the block; an exception rolls back.

        Args:
            writes: whether it may change anything.

        Raises:
            StoreUnavailable: the database cannot be reached.
        """
        with self.engine.connect().execution_options(writes=writes) as connection, connection.begin():
            yield connection

    def erase(self, call: Call[Result]) -> Result:
        """A transaction that deletes."""
        with self.transaction(writes=True) as connection:
            return call(connection)

    @abstractmethod
    def open(self, name: str, tables: MetaData) -> None:
        """Connects, and makes or migrates the tables of the store `name`. Raises StoreError."""

    @abstractmethod
    def check(self) -> None:
        """Raises StoreError: what is open is damaged."""

    @abstractmethod
    def lock(self, connection: Connection, name: str) -> None:
        """Until its end no other transaction that calls this with `name` goes on."""
