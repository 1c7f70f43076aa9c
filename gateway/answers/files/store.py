"""What is known of uploaded files, in a database; their bytes are blobs."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, select, true

from gateway.answers.files.tables import files, spaces, tables
from gateway.errors import ApiError
from gateway.store.database import Database
from gateway.store.queries import owned_by, rows_behind
from gateway.store.row_blobs import BlobStore


@dataclass(frozen=True)
class StoredFile:
    """An uploaded file.

    Attributes:
        owner: name of its API key; "" without keys.
        filename: the client's.
        created_at: Unix seconds.
        expires_at: Unix seconds.
    """

    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: float


_COLUMNS = [files.c[name] for name in StoredFile.__dataclass_fields__]


class FileStore(BlobStore):
    """Owners see their own files only; owner None sees all. Nobody sees expired ones.

    Args:
        place: as of `Store`.
        most_bytes: of all files.
        most_of_owner: files.
    """

    name, setting, fault = "files", "files_dir", "files cannot be stored or read"
    tables, spaces = tables, spaces

    def __init__(self, place: Database | Path | None, most_bytes: int, most_of_owner: int) -> None:
        super().__init__(place)
        self._most_bytes, self._most_of_owner = most_bytes, most_of_owner

    async def add(self, file: StoredFile) -> None:
        """Raises ApiError: 400, there is no room."""

        def add(connection: Connection) -> None:
            self.database.lock(connection, self.name)  # nobody adds another one in between
            self._check(connection, file.owner, file.bytes)
            connection.execute(insert(files).values(asdict(file)))

        await self.write(add)

    async def check_room(self, owner: str) -> int:
        """Bytes that a new file may have. Raises ApiError: 400, there is no room."""
        return await self.read(lambda connection: self._check(connection, owner, 1))

    def _check(self, connection: Connection, owner: str, size: int) -> int:
        these, alive = func.count(), files.c.expires_at > time.time()
        if connection.execute(select(these).where(files.c.owner == owner, alive)).scalar_one() >= self._most_of_owner:
            whose = "this API key has" if owner else "there are"
            raise _no_room(f"{whose} {self._most_of_owner} files, as many as may be", "max_files_per_key")
        total = connection.execute(select(func.coalesce(func.sum(files.c.bytes), 0)).where(alive)).scalar_one()
        if int(total) + size > self._most_bytes:
            raise no_room_for(self._most_bytes)
        return self._most_bytes - int(total)

    async def get(self, file_id: str, owner: str | None) -> StoredFile | None:
        """None: there is none, or it is another owner's."""
        return (await self.several([file_id], owner)).get(file_id)

    async def several(self, ids: Sequence[str], owner: str | None) -> dict[str, StoredFile]:
        """By id; what there is of them."""
        found = select(*_COLUMNS).where(files.c.id.in_(ids), _visible(owner))
        rows = await self.read(lambda connection: connection.execute(found).all())
        return {row.id: _file_of(row) for row in rows}

    async def page(
        self, after: str | None, limit: int, order: str, purpose: str | None, owner: str | None
    ) -> list[StoredFile] | None:
        """At most `limit` of the owner's, in "asc" or "desc" order of creation.

        Args:
            after: id of the file before them.

        Returns:
            None: there is no such file.
        """
        found, only = select(*_COLUMNS).where(_visible(owner)), None if purpose is None else files.c.purpose == purpose
        is_after = None if after is None else files.c.id == after

        def read(connection: Connection) -> list[StoredFile] | None:
            rows = rows_behind(connection, found, files.c.sequence, is_after, limit, order == "desc", only)
            return None if rows is None else list(map(_file_of, rows))

        return await self.read(read)

    async def remove(self, ids: Iterable[str]) -> None:
        gone = delete(files).where(files.c.id.in_(list(ids)))
        await self.erase(lambda connection: connection.execute(gone))

    async def expired(self, only: Sequence[str] | None = None) -> list[str]:
        """Ids of files that nobody sees any more, the longest expired first; at most 1000. `only`: those of these."""
        meant = true() if only is None else files.c.id.in_(only)
        gone = select(files.c.id).where(files.c.expires_at <= time.time(), meant)
        these = gone.order_by(files.c.expires_at).limit(1000)
        return await self.read(lambda connection: list(connection.execute(these).scalars()))

    async def known(self, ids: Sequence[str]) -> set[str]:
        """Those of `ids` that there are."""
        these = select(files.c.id).where(files.c.id.in_(ids))
        return await self.read(lambda connection: set(connection.execute(these).scalars()))


def no_room_for(most_bytes: int) -> ApiError:
    return _no_room(f"the files of this server would be more than {most_bytes} bytes", "max_files_bytes")


def _no_room(fault: str, setting: str) -> ApiError:
    return ApiError(400, f"{fault}; delete one, or have the operator raise {setting}", None, "too_many_files")


def _visible(owner: str | None) -> ColumnElement[bool]:
    return (files.c.expires_at > time.time()) & owned_by(owner, files.c.owner)


def _file_of(row: Row[Any]) -> StoredFile:
    return StoredFile(**row._mapping)
