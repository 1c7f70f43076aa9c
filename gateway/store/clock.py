"""The time by which leases end: that of the database, as gateways' clocks differ."""

import time

from sqlalchemy import Connection, text


def now(connection: Connection) -> float:
    """Unix seconds."""
    if connection.dialect.name == "sqlite":  # a file of this machine
        return time.time()
    return float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
