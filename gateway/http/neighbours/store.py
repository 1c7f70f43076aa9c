"""Where gateways reach each other, in the database of all."""

from sqlalchemy import Connection, delete, insert, select, update

from gateway.http.neighbours.tables import neighbours, tables
from gateway.store import clock
from gateway.store.store import ClientStore


class NeighbourStore(ClientStore):
    """Methods raise ApiError: 503, the database cannot be reached."""

    name, setting = "neighbours", "database_url"
    tables = tables
    fault = "other gateways cannot be found"

    async def announce(self, name: str, url: str) -> None:
        """The gateway `name` is at `url`, for a lease from now on. Forgets those whose leases are over."""

        def announce(connection: Connection) -> None:
            mine = {"url": url, "there_until": clock.lease_end(connection)}
            if not connection.execute(update(neighbours).where(neighbours.c.name == name).values(mine)).rowcount:
                connection.execute(insert(neighbours).values(name=name, **mine))
            # one that is back just now, and holds its row, is not waited for
            gone = select(neighbours.c.name).where(neighbours.c.there_until <= clock.now(connection))
            names = gone.with_for_update(skip_locked=True)
            connection.execute(delete(neighbours).where(neighbours.c.name.in_(names)))

        await self.write(announce)

    async def leave(self, name: str) -> None:
        """The gateway `name` stops."""
        await self.write(lambda connection: connection.execute(delete(neighbours).where(neighbours.c.name == name)))

    async def url_of(self, name: str) -> str | None:
        """None: there is no such gateway, or it has gone."""

        def find(connection: Connection) -> str | None:
            is_there = neighbours.c.there_until > clock.now(connection)
            return connection.execute(select(neighbours.c.url).where(neighbours.c.name == name, is_there)).scalar()

        return await self.read(find)
