"""The clock of a database, which all its gateways share, and by which their leases end."""

import time

from sqlalchemy import Connection, text

LEASE_S = 15.0  # what a gateway makes is its own for so long after it said so last
_POSTGRES = text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)")


def now(connection: Connection) -> float:
    """Unix seconds. SQLite's file is of one machine, and so is its clock."""
    return time.time() if connection.dialect.name == "sqlite" else connection.execute(_POSTGRES).scalar_one()


def lease_end(connection: Connection) -> float:
    """Unix seconds until which a lease holds that begins or is renewed now."""
    return now(connection) + LEASE_S
