"""Schemas of stores, by Alembic: each store's revisions are a folder of their own, from the first release's on."""

import threading
from collections.abc import Collection
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from gateway.store.errors import StoreError

_HERE = Path(__file__).parent
_ALEMBICS = 1000  # SQLite's user_version of a file whose revision stands in a table; gateways before 0.3.0 refuse it
_one_at_a_time = threading.Lock()  # Alembic keeps what it works on in its modules


def upgrade(connection: Connection, name: str, where: str) -> None:
    """Makes the tables of the store `name`, or brings them to the newest revision.

    Args:
        where: the database, for errors.

    Raises:
        StoreError: they are of a newer version of the gateway.
    """
    numbers = [int(file.stem.partition("_")[0]) for file in (_HERE / "versions" / name).glob("[0-9]*.py")]
    before = _of_before(connection, name, where, numbers)
    if before is None and _revision(connection, name) == f"{name}_{max(numbers)}":
        return
    from alembic import command  # takes half a second: as long as all else that a gateway does until it listens
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(_HERE))
    config.set_main_option("version_locations", str(_HERE / "versions" / name))
    config.set_main_option("path_separator", "os")
    config.attributes |= {"connection": connection, "version_table": _table(name)}
    with _one_at_a_time:
        if before is not None:
            command.stamp(config, before)
        try:
            command.upgrade(config, "head")
        except CommandError:
            raise _newer(where, f"revision {_revision(connection, name)}") from None
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA user_version = {_ALEMBICS}")


def _of_before(connection: Connection, name: str, where: str, numbers: Collection[int]) -> str | None:
    """The revision that a SQLite file of 0.2.0 or before has, which counted in its user_version."""
    if connection.dialect.name != "sqlite":
        return None
    version: int = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    if version in (0, _ALEMBICS):
        return None
    if version not in numbers:
        raise _newer(where, f"format {version}")
    return f"{name}_{version}"


def _revision(connection: Connection, name: str) -> str:
    if not inspect(connection).has_table(_table(name)):
        return "unknown"
    return connection.execute(text(f"SELECT version_num FROM {_table(name)}")).scalar_one()


def _newer(where: str, which: str) -> StoreError:
    return StoreError(f"{where}: written by another version of the gateway ({which}); use another place, or that one")


def _table(name: str) -> str:
    return f"{name}_revision"
