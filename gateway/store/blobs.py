"""Named byte sequences: in a folder of one machine, or in a bucket that many gateways share."""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError, GenericError
from obstore.store import LocalStore, ObjectStore, S3Store

from gateway.store.errors import StoreError, StoreUnavailable, first_line

if TYPE_CHECKING:  # it has no such name when it runs
    from obstore import GetResult

PART_BYTES = 5 * 1024 * 1024  # the least that S3 takes as one of several parts
_PARALLEL_PARTS = 2
# Of one that is written: the part that arrives, the one that waits, and those on their way.
WRITING_BYTES = (3 + _PARALLEL_PARTS) * PART_BYTES
_READ_BYTES = 256 * 1024
_LISTED = 1000
_RETRIES, _RETRY_S = 3, 10
_REFUSED = re.compile(r"status:? 4\d\d|status client error")  # S3 is there, and says no
# A file of gigabytes takes its time, but a server that says nothing does not have all of it.
_CLIENT = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=30),
    "timeout": timedelta(hours=1),
}


class Blobs:
    """Each is complete or absent. Names are made here, never by clients, and may have slashes.

    Args:
        place: a folder, which is made for its owner only; or s3://BUCKET/PREFIX, whose server and credentials are in
            the environment: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...
        setting: of the place, for errors.

    Methods raise StoreUnavailable, the bucket cannot be reached, or StoreError, the place cannot be used.
    """

    def __init__(self, place: Path | str, setting: str) -> None:
        self._place, self._where = place, f"{setting} {place}"
        self._store: ObjectStore | None = None

    async def put(self, name: str, pieces: AsyncIterable[bytes]) -> int:
        """Writes one, and returns its size. If this raises, or is cancelled, or if `pieces` raises, there is none."""
        store = await self._opened()
        async with aclosing(_parts(pieces)) as parts:
            first, second = await anext(parts, b""), await anext(parts, None)
            if second is None:
                size = len(first)
                await self._whole(
                    name, asyncio.ensure_future(obstore.put_async(store, name, first, use_multipart=False))
                )
            else:
                size = await self._stream(store, name, first, second, parts)
        if isinstance(self._place, Path):
            await self._whole(name, asyncio.ensure_future(asyncio.to_thread(_keep, self._place / name)))
        return size

    async def _stream(
        self, store: ObjectStore, name: str, first: bytes, second: bytes, parts: AsyncIterator[bytes]
    ) -> int:
        given: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        is_cut = False

        async def body() -> AsyncIterator[bytes]:
            yield first
            yield second
            while (part := await given.get()) is not None:
                yield part
            if is_cut:  # then the library takes back what it has written
                raise _Cut

        size = len(first) + len(second)
        writing = asyncio.ensure_future(
            obstore.put_async(store, name, body(), chunk_size=PART_BYTES, max_concurrency=_PARALLEL_PARTS)
        )
        try:
            async for part in parts:
                size += len(part)
                await _give(given, part, writing)
            await _give(given, None, writing)
            with self._errors():
                await asyncio.shield(writing)
        except BaseException:
            is_cut = True
            while not given.empty():
                given.get_nowait()
            given.put_nowait(None)
            await asyncio.shield(self._undone(name, writing))
            raise
        return size

    async def _whole(self, name: str, writing: "asyncio.Future[Any]") -> None:
        """Waits for the end of `writing`, which a cancellation does not cut short; then there is nothing."""
        try:
            with self._errors():
                await asyncio.shield(writing)
        except BaseException:
            await asyncio.shield(self._undone(name, writing))
            raise

    async def _undone(self, name: str, writing: "asyncio.Future[Any]") -> None:
        await asyncio.wait([writing])
        if not writing.cancelled():
            writing.exception()  # else asyncio logs it as one that nobody looked at
        with suppress(StoreError):  # what was put may be there all the same
            await self.delete(name)

    async def open(self, name: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None] | None:
        """Its bytes from `start` to before `end`, or to its own. None: there is none of that name."""
        if end is not None and end <= start:
            return _nothing()
        store = await self._opened()
        wanted = {"offset": start} if end is None else (start, end)
        options = {"range": wanted} if start or end is not None else {}
        try:
            with self._errors(of_missing=True):
                found = await obstore.get_async(store, name, options=options)  # pyright: ignore[reportArgumentType]
        except FileNotFoundError:
            return None
        return self._pieces(found)

    async def _pieces(self, found: "GetResult") -> AsyncGenerator[bytes, None]:
        with self._errors():
            async for piece in found.stream(min_chunk_size=_READ_BYTES):
                yield bytes(piece)

    async def size(self, name: str) -> int | None:
        """None: there is none of that name."""
        store = await self._opened()
        try:
            with self._errors(of_missing=True):
                return (await obstore.head_async(store, name))["size"]
        except FileNotFoundError:
            return None

    async def delete(self, name: str) -> None:
        """Removes it, if it is there."""
        store = await self._opened()
        with suppress(FileNotFoundError), self._errors(of_missing=True):
            await obstore.delete_async(store, name)

    async def older(self, within: str, than: float) -> AsyncGenerator[list[str], None]:
        """Names below `within` that were complete before `than`, in Unix seconds. Removes what crashes cut short."""
        store = await self._opened()
        if isinstance(self._place, Path):
            await asyncio.to_thread(_remove_cut, self._place / within, than)
        with self._errors():
            async for found in obstore.list(store, within, chunk_size=_LISTED):
                yield [each["path"] for each in found if each["last_modified"].timestamp() < than]

    async def _opened(self) -> ObjectStore:
        if self._store is None:
            try:
                self._store = await asyncio.to_thread(self._open)
            except (OSError, BaseError, ValueError) as error:
                raise StoreError(f"{self._where}: cannot be used: {first_line(error)}") from None
        return self._store

    def _open(self) -> ObjectStore:
        if isinstance(self._place, Path):
            self._place.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._place.chmod(0o700)
            return LocalStore(self._place)
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        client = {**_CLIENT, "allow_http": endpoint.startswith("http://")}
        retry = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}
        return S3Store.from_url(self._place, client_options=client, retry_config=retry)  # pyright: ignore

    @contextmanager
    def _errors(self, of_missing: bool = False) -> Iterator[None]:
        """`of_missing`: FileNotFoundError is let through. A missing bucket is one, too."""
        try:
            yield
        except (BaseError, OSError) as error:
            if of_missing and isinstance(error, FileNotFoundError):
                raise
            said = first_line(error)
            is_away = isinstance(error, GenericError) and isinstance(self._place, str) and not _REFUSED.search(said)
            raise (StoreUnavailable if is_away else StoreError)(f"{self._where}: {said}") from None


class _Cut(Exception):
    """What would be written does not come whole."""


async def _parts(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """As parts of PART_BYTES; the last one has what is left."""
    part = bytearray()
    async for piece in pieces:
        part += piece
        while len(part) >= PART_BYTES:
            yield bytes(part[:PART_BYTES])
            del part[:PART_BYTES]
    if part:
        yield bytes(part)


async def _give(given: "asyncio.Queue[bytes | None]", part: bytes | None, writing: "asyncio.Future[Any]") -> None:
    """Waits for room, or for the end of `writing`, which tells its error itself."""
    giving = asyncio.ensure_future(given.put(part))
    try:
        await asyncio.wait([giving, writing], return_when=asyncio.FIRST_COMPLETED)
    finally:
        giving.cancel()


async def _nothing() -> AsyncGenerator[bytes, None]:
    return
    yield b""


def _keep(file: Path) -> None:
    """Makes it private, and has it on disk before anybody counts on it."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fchmod(handle, 0o600)
        os.fsync(handle)
    finally:
        os.close(handle)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove_cut(folder: Path, than: float) -> None:
    """Removes unfinished files, which have a # in their names, that nobody wrote to since `than`."""
    for file in folder.glob("*#*") if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            if file.stat().st_mtime < than:
                file.unlink()
