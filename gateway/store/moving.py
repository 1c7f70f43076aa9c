"""Copies the tables of one store to an empty place, e.g. from SQLite to PostgreSQL."""

from collections.abc import Callable

from sqlalchemy import Connection, Integer, Table, func, insert, select, text

from gateway.store.database import Database
from gateway.store.errors import StoreError
from gateway.store.store import Store

_ROWS_AT_ONCE = 200  # a voice's sample may have megabytes


def copy(
    kind: type[Store], source: Database, target: Database, report: Callable[[str, int, int], None]
) -> dict[str, int]:
    """Copies all rows of a kind of store, in one transaction of the target. Blocking.

    Args:
        report: called with a table, its rows so far, and all its rows.

    Returns:
        the rows of each table.

    Raises:
        StoreError: a place cannot be used, or the target has rows already.
    """
    for database in (source, target):  # nothing is recovered: that is of a gateway that starts
        database.prepare(kind.name, kind.tables, lambda _: None)
    with source.transaction(writes=False) as reading, target.transaction(writes=True) as writing:
        tables = kind.tables.sorted_tables  # a row comes after those that it refers to
        for table in tables:
            if writing.execute(select(table).limit(1)).first() is not None:
                raise StoreError(f"{target.where}: its table {table.name} has rows; move to an empty database")
        return {table.name: _copy(table, reading, writing, report) for table in tables}


def _copy(table: Table, reading: Connection, writing: Connection, report: Callable[[str, int, int], None]) -> int:
    total = reading.execute(select(func.count()).select_from(table)).scalar_one()
    done = 0
    for rows in reading.execute(select(table)).mappings().partitions(_ROWS_AT_ONCE):
        writing.execute(insert(table), [dict(row) for row in rows])
        done += len(rows)
        report(table.name, done, total)
    if writing.dialect.name == "postgresql":
        for column in table.primary_key:
            if isinstance(column.type, Integer) and column.autoincrement is True:  # its counter goes on behind the last
                last = func.coalesce(select(func.max(column)).scalar_subquery(), 1)
                counter = func.pg_get_serial_sequence(text(f"'{table.name}'"), text(f"'{column.name}'"))
                writing.execute(select(func.setval(counter, last)))
    return done
