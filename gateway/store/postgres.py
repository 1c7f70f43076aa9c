"""A PostgreSQL database of many gateways."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg.abc import Buffer
from psycopg.types.string import StrDumper
from pydantic import SecretStr
from sqlalchemy import Connection, MetaData, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from gateway.store import migrations
from gateway.store.database import Database
from gateway.store.errors import Conflict, StoreError, StoreUnavailable, first_line

_CONNECTIONS = 8  # of one process; each has a thread
_CONNECT_S = 5
_WAIT_S = 10.0  # for one of the connections
_STATEMENT_MS = 30_000
_LOCK_MS = 10_000
_SCHEMES = ("postgresql", "postgres")
# Errors that say nothing of the statement: the server starts, stops, is full, or has lost the connection.
# Beginnings of SQLSTATE; 25006: a standby, which takes no changes; 55P03: others have held a lock for too long.
_UNAVAILABLE = ("08", "53", "57", "25006", "55P03")

_NO_NUL = "\ufffd"  # instead of a zero character, which PostgreSQL's texts cannot have: no id of ours has either
_CONFLICT = "40"  # a deadlock, or what could not be put in an order


class PostgresDatabase(Database):
    """All stores of a gateway have one. Every change is confirmed by the server when its call returns.

    Args:
        url: postgresql://USER:PASSWORD@HOST:PORT/NAME; libpq's parameters may follow a "?". What is not said comes from
            libpq's environment, e.g. PGPASSWORD.

    Raises:
        StoreError: `url` is none of PostgreSQL's.
    """

    def __init__(self, url: str) -> None:
        try:
            read = make_url(url)
        except ArgumentError:
            raise StoreError("database_url: is no URL; write it as postgresql://USER@HOST/NAME") from None
        if read.drivername not in _SCHEMES:
            raise StoreError(f"database_url: {read.drivername} is not served; write it as postgresql://USER@HOST/NAME")
        super().__init__(f"database_url {read.render_as_string()}", _CONNECTIONS)
        options = f"-c statement_timeout={_STATEMENT_MS} -c lock_timeout={_LOCK_MS}"
        self.engine = create_engine(
            read.set(drivername="postgresql+psycopg"),
            pool_size=_CONNECTIONS,
            max_overflow=0,
            pool_timeout=_WAIT_S,
            pool_pre_ping=True,  # the server may have been started anew
            hide_parameters=True,  # in errors, which are logged: clients said them
            connect_args={"connect_timeout": _CONNECT_S, "options": options, "application_name": "quartet-gateway"},
        )
        event.listen(self.engine, "connect", _take_any_text)

    @contextmanager
    def transaction(self, writes: bool) -> Iterator[Connection]:
        """Raises StoreUnavailable; Conflict: nothing was changed, another try may work."""
        try:
            with super().transaction(writes) as connection:
                yield connection
        except PoolTimeout:
            raise StoreUnavailable(f"{self.where}: all connections are in use") from None
        except DBAPIError as error:
            state = getattr(error.orig, "sqlstate", None)
            if state is not None and state.startswith(_CONFLICT):
                raise Conflict(f"{self.where}: {first_line(error)}") from None
            if error.connection_invalidated or _is_away(error, state):
                raise StoreUnavailable(f"{self.where}: {first_line(error)}") from None
            raise

    def open(self, name: str, tables: MetaData) -> None:
        with self.transaction(writes=True) as connection:
            self.lock(connection, "migrations")  # another gateway may start now, too
            migrations.upgrade(connection, name, self.where)

    def check(self) -> None:
        with self.transaction(writes=False) as connection:
            connection.execute(text("SELECT 1"))

    def lock(self, connection: Connection, name: str) -> None:
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:name))"), {"name": f"quartet.{name}"})


def database_of(url: SecretStr | None) -> PostgresDatabase | None:
    """That of the setting `database_url`. Raises StoreError."""
    return None if url is None else PostgresDatabase(url.get_secret_value())


class _TextDumper(StrDumper):
    def dump(self, obj: str) -> Buffer | None:
        return super().dump(obj.replace("\0", _NO_NUL))


def _take_any_text(connection: psycopg.Connection, _: object) -> None:
    connection.adapters.register_dumper(str, _TextDumper)


def _is_away(error: DBAPIError, state: str | None) -> bool:
    """Whether the server said nothing, or that it cannot answer now."""
    return isinstance(error, OperationalError) if state is None else state.startswith(_UNAVAILABLE)
