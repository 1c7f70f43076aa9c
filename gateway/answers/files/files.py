"""Uploaded files: what is known of them, and their bytes."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import structlog

from gateway.answers.files.store import FileStore, StoredFile, no_room_for
from gateway.errors import ApiError
from gateway.settings import GatewaySettings
from gateway.store.database import Database
from gateway.store.errors import required, store_errors
from gateway.store.row_blobs import RowBlobs, blobs_of
from gateway.store.sqlite import file_of
from gateway.store.sweeping import sweep_often
from gateway.tasks import cancel

log = structlog.get_logger()


class Files:
    """From `begin` to `close`, expired files are removed, and bytes that a crash left without a row.

    Args:
        place: of the rows, as of `Store`.

    Raises:
        ApiError: from every method: 500, the place cannot be used; 503, it cannot be reached.
    """

    def __init__(self, place: Database | Path | None, settings: GatewaySettings) -> None:
        with store_errors(FileStore.fault):
            blobs = blobs_of(settings)
            if place is None:
                place = required(settings.files_dir, "files_dir", "files")
        self.store = FileStore(place, settings.max_files_bytes, settings.max_files_per_key)
        self._blobs = RowBlobs(blobs, self.store)
        self._arriving = 0  # bytes
        self._max_bytes = settings.max_files_bytes

    def begin(self) -> None:
        self._sweeping = asyncio.create_task(sweep_often(self.sweep, self.store.name))

    async def close(self) -> None:
        await cancel(self._sweeping)
        await self.store.close()

    async def create(
        self, pieces: AsyncIterable[bytes], owner: str | None, described: Callable[[], StoredFile]
    ) -> StoredFile:
        """Keeps a file. If this raises, or is cancelled, nothing of it is left.

        Args:
            described: says what it is when all pieces were read; its size and its owner are filled in.

        Raises:
            ApiError: 400, there is no room; what `pieces` and `described` raise.
        """
        file_id = f"file-{secrets.token_hex(16)}"
        left_bytes = await self.store.check_room(owner or "")
        async with aclosing(self._counted(pieces, left_bytes)) as counted:
            size = await self._blobs.put(file_id, counted)
        try:
            file = replace(described(), id=file_id, owner=owner or "", bytes=size)
            await self.store.add(file)
        except BaseException:
            await asyncio.shield(self._forget(file_id))
            raise
        return file

    async def _forget(self, file_id: str) -> None:
        try:
            await self._blobs.delete(file_id)
        except ApiError:  # which is logged; a sweep does it later
            log.error("the bytes of a file are left", file=file_id)

    async def _counted(self, pieces: AsyncIterable[bytes], left_bytes: int) -> AsyncGenerator[bytes, None]:
        """Raises ApiError: 400, all that arrive now are more than there is room for."""
        size = 0
        try:
            async for piece in pieces:
                size += len(piece)
                self._arriving += len(piece)
                if self._arriving > left_bytes:
                    raise no_room_for(self._max_bytes)
                yield piece
        finally:
            self._arriving -= size

    async def get(self, file_id: str, owner: str | None) -> StoredFile | None:
        """None: there is none, or it is another owner's."""
        file = await self.store.get(file_id, owner)
        if file is None:
            await self._sweep_expired([file_id])
        return file

    async def open(self, file: StoredFile, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None]:
        """Its bytes from `start` to before `end`, or to its own. Raises ApiError: 404, they were removed."""
        pieces = await self._blobs.open(file.id, start, end)
        if pieces is None:
            log.error("the bytes of a file are gone", file=file.id)
            raise ApiError(404, f"{file.id}: its bytes were removed from this server's storage", None, "not_found")
        return pieces

    async def delete(self, file: StoredFile) -> None:
        """The bytes go first: once a client is answered, they are gone."""
        await self._remove([file.id])

    async def sweep(self) -> None:
        """Removes what has expired, and bytes without a row."""
        await self._sweep_expired()
        await self._blobs.sweep(self.store.known)

    async def _sweep_expired(self, only: Sequence[str] | None = None) -> None:
        while expired := await self.store.expired(only):
            await self._remove(expired)

    async def _remove(self, ids: Sequence[str]) -> None:
        for file_id in ids:
            await self._blobs.delete(file_id)
        await self.store.remove(ids)


def has_files(settings: GatewaySettings) -> bool:
    """Whether an earlier gateway may have left some. Blocking."""
    return settings.files_dir is not None and file_of(settings.files_dir, FileStore.name).exists()
