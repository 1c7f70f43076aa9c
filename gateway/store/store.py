"""What all stores share."""

from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from sqlalchemy import Connection, MetaData

from gateway.store.database import Call, Database
from gateway.store.errors import Conflict, StoreUnavailable, store_errors
from gateway.store.sqlite import SqliteDatabase

Result = TypeVar("Result")
_TRIES = 3


class Store:
    """Tables in a database. Every change is kept when its call returns.

    Args:
        place: a database that others use, too, and that its owner closes; else the directory of a SQLite file, or None:
            memory.

    Attributes:
        name: of its folder of migrations, and of a SQLite file without .sqlite.
        setting: of the directory.
        tables: of the newest revision.
        pragmas: of a SQLite file, beside those of all.
    """

    name: ClassVar[str]
    setting: ClassVar[str]
    tables: ClassVar[MetaData]
    pragmas: ClassVar[tuple[str, ...]] = ("journal_mode = WAL",)

    def __init__(self, place: Database | Path | None) -> None:
        self._is_own = not isinstance(place, Database)
        self.database = (
            place if isinstance(place, Database) else SqliteDatabase(place, self.name, self.setting, self.pragmas)
        )

    def recover(self, connection: Connection) -> None:
        """Ends what an earlier process left."""

    def check(self) -> None:
        """Blocking. Raises StoreError: the database cannot be used, or is damaged."""
        self.prepare()
        try:
            self.database.check()
        finally:
            if self._is_own:
                self.database.close()

    async def open(self) -> None:
        """Opens the database, which else its first use does: that is late enough for one that cannot be reached now.

        Raises:
            StoreError: it cannot be used.
        """
        with suppress(StoreUnavailable):
            await self.database.run(self.prepare)

    async def __aenter__(self) -> Self:
        await self.database.run(self.prepare)
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def close(self) -> None:
        if self._is_own:
            await self.database.shutdown()

    async def read(self, call: Call[Result]) -> Result:
        """What `call` returns, in a transaction in a thread of the database's. It may be called again, as two
        transactions may need what the other one has. Raises StoreError; SQLAlchemyError."""
        return await self._run(call, writes=False)

    async def write(self, call: Call[Result]) -> Result:
        """As `read`, with changes."""
        return await self._run(call, writes=True)

    async def erase(self, call: Call[Result]) -> Result:
        """As `write`; what is deleted stays nowhere, and a full disk does not hinder it."""

        def erase() -> Result:
            self.prepare()
            return self.database.erase(call)

        return await self.database.run(erase)

    async def _run(self, call: Call[Result], writes: bool) -> Result:
        def run() -> Result:
            self.prepare()
            for _ in range(_TRIES - 1):
                with suppress(Conflict):
                    return self._once(call, writes)
            return self._once(call, writes)

        return await self.database.run(run)

    def _once(self, call: Call[Result], writes: bool) -> Result:
        with self.database.transaction(writes) as connection:
            return call(connection)

    def prepare(self) -> None:
        self.database.prepare(self.name, self.tables, self.recover)


class ClientStore(Store):
    """A store whose errors clients get as a 500 that says `fault`, or as a 503 if the database cannot be reached."""

    fault: ClassVar[str]

    async def _run(self, call: Call[Result], writes: bool) -> Result:
        with store_errors(self.fault):
            return await super()._run(call, writes)

    async def erase(self, call: Call[Result]) -> Result:
        with store_errors(self.fault):
            return await super().erase(call)
