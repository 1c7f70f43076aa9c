"""The clock of a database, which all its gateways share."""

import time

from sqlalchemy import Connection, text

_POSTGRES = text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)")


def now(connection: Connection) -> float:
    """Unix seconds. SQLite's file is of one machine, and so is its clock."""
    return time.time() if connection.dialect.name == "sqlite" else connection.execute(_POSTGRES).scalar_one()
