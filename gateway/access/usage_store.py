"""What each gateway uses of keys' limits, in the database of all gateways.

Gateways' clocks differ: times are those of the database, and each gateway converts them to its own clock and back.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping

from sqlalchemy import Connection, case, delete, insert, select, update

from gateway.access.key_usage import KeyUsage
from gateway.access.others import Others
from gateway.access.usage_tables import gateways, tables, usage
from gateway.store import clock
from gateway.store.store import Store

FORGOTTEN_S = 120.0  # nothing that a gateway admitted so long ago counts


class UsageStore(Store):
    """Methods raise StoreError and SQLAlchemyError."""

    name, setting = "usage", "database_url"
    tables = tables

    async def exchange(
        self,
        gateway: str,
        own: Mapping[str, KeyUsage],
        changed: Collection[str] | None,
        others: Others,
        now: Callable[[], float],
    ) -> dict[str, KeyUsage]:
        """Writes what `gateway` uses, and returns what is new of what `others` use; both by name of the key.

        Args:
            changed: keys whose use is another than at its last call; None: all.
            now: its clock.
        """

        def exchange(connection: Connection) -> dict[str, KeyUsage]:
            at = clock.now(connection)
            local = now()
            _report(connection, gateway, own, changed, at, local)
            ago = at - FORGOTTEN_S
            admitted = case((usage.c.as_of >= others.since, usage.c.admitted)).label("admitted")
            columns = [column for column in usage.c if column.name != "admitted"]
            read = select(*columns, admitted, gateways.c.seen_at).join(gateways)
            rows = connection.execute(read.where(gateways.c.name != gateway, gateways.c.seen_at > ago)).all()
            # one that is back just now, and holds its row, removes nobody who waits for it
            gone = select(gateways.c.name).where(gateways.c.seen_at <= ago).with_for_update(skip_locked=True)
            connection.execute(delete(gateways).where(gateways.c.name.in_(gone)))
            return others.take(rows, at, local)

        return await self.write(exchange)


def _report(
    connection: Connection,
    gateway: str,
    own: Mapping[str, KeyUsage],
    changed: Collection[str] | None,
    at: float,
    local: float,
) -> None:
    seen = update(gateways).where(gateways.c.name == gateway).values(seen_at=at)
    if not connection.execute(seen).rowcount:  # its first call, or others have removed it
        connection.execute(insert(gateways).values(name=gateway, seen_at=at))
        changed = None
    mine = usage.c.gateway == gateway
    before = mine if changed is None else mine & usage.c.key_name.in_(changed)
    connection.execute(delete(usage).where(before))
    second, version = int(local), time.time_ns()
    rows = [
        {
            "gateway": gateway,
            "key_name": key_name,
            "version": version,
            "running": each.running,
            "sessions": each.sessions,
            "as_of": at - (local - second),
            # a request counts as one of the end of its second: never too short
            "admitted": json.dumps([[second - begun - 1, requests] for begun, requests in each.admitted.items()]),
        }
        for key_name, each in own.items()
        if changed is None or key_name in changed
    ]
    if rows:
        connection.execute(insert(usage), rows)
