"""Uploaded voices, a row each. Its sample is in there, too, or where many gateways find it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import structlog
from sqlalchemy import ColumnElement, Connection, Row, case, delete, func, insert, or_, select

from gateway.answers.voice_tables import spaces, tables, voices
from gateway.errors import ApiError
from gateway.settings import GatewaySettings
from gateway.store.blobs import Blobs
from gateway.store.database import Database
from gateway.store.errors import required
from gateway.store.queries import owned_by
from gateway.store.row_blobs import BlobStore, RowBlobs, shared_blobs_of
from gateway.store.sweeping import sweep_often
from gateway.tasks import cancel

_BLOB = b""  # instead of a sample, in the row of one that is a blob

log = structlog.get_logger()


@dataclass(frozen=True)
class UploadedVoice:
    """An uploaded voice.

    Attributes:
        name: unique among its owner's, ignoring case.
        consent: who agreed, as the client says.
        text: spoken in the sample; "": unknown.
        seconds: length of the sample.
        created_at: Unix seconds.
        owner: name of its API key; None without keys.
    """

    id: str
    name: str
    consent: str
    text: str
    seconds: float
    created_at: int
    owner: str | None


_COLUMNS = [voices.c[field.name] for field in fields(UploadedVoice)]


class VoiceStore(BlobStore):
    """The voices of one place, which several gateways may share. A voice is complete or absent. From `begin` to
    `close`, samples that a crash left without a row are removed.

    Args:
        place: as of `Store`, but None is a StoreError.
        most: voices of all owners.
        blobs: where all gateways of the place find samples; None: in the rows. Those that are in rows from before count
            all the same.

    Raises:
        ApiError: from every method: 500, the place cannot be used; 503, it cannot be reached.
    """

    name, setting, fault = "voices", "voices_dir", "uploaded voices cannot be read or written"
    tables, spaces = tables, spaces
    # Nothing of a deleted voice stays in the file. No write-ahead log: it would keep what was deleted for longer.
    pragmas = ("auto_vacuum = FULL",)

    def __init__(
        self, place: Database | Path | None, most: int, most_of_owner: int, blobs: Blobs | None = None
    ) -> None:
        super().__init__(place if isinstance(place, Database) else required(place, self.setting, self.name))
        self._most, self._most_of_owner = most, most_of_owner
        self._shared = None if blobs is None else RowBlobs(blobs, self)
        self._sweeping: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._shared is not None:
            self._sweeping = asyncio.create_task(sweep_often(self.sweep, self.name))

    async def close(self) -> None:
        if self._sweeping is not None:
            await cancel(self._sweeping)
        await super().close()

    async def add(self, voice: UploadedVoice, flac: bytes) -> None:
        """If this raises, nothing is left; nor if it is cancelled, where samples are blobs.

        Raises:
            ApiError: 409, the owner has a voice of that name; 400, there is no room.
        """
        if self._shared is None:
            await self._insert(voice, flac)
            return
        await self.read(lambda connection: self._check_room(connection, voice))  # before anything goes anywhere
        await self._shared.put(voice.id, _whole(flac))
        adding = asyncio.ensure_future(self._insert(voice, _BLOB))
        try:
            await asyncio.shield(adding)
        except BaseException:
            await asyncio.shield(self._undo(voice, adding, self._shared))
            raise

    async def _insert(self, voice: UploadedVoice, sample: bytes) -> None:
        row = asdict(voice) | {"sample": sample, "folded_name": voice.name.casefold()}

        def add(connection: Connection) -> None:
            self.database.lock(connection, self.name)  # nobody adds another one in between
            self._check_room(connection, voice)
            connection.execute(insert(voices).values(row))

        await self.write(add)

    def _check_room(self, connection: Connection, voice: UploadedVoice) -> None:
        is_named_so = voices.c.folded_name == voice.name.casefold()
        if _count(connection, is_named_so, owned_by(voice.owner, voices.c.owner)):
            message = f"name: there is a voice {voice.name!r}; delete it first, or choose another name"
            raise ApiError(409, message, "name", "voice_exists")
        if voice.owner and _count(connection, voices.c.owner == voice.owner) >= self._most_of_owner:
            raise _too_many("this API key has", self._most_of_owner, "max_voices_per_key")
        if _count(connection) >= self._most:
            raise _too_many("this server keeps", self._most, "max_voices")

    async def _undo(self, voice: UploadedVoice, adding: "asyncio.Future[None]", shared: RowBlobs) -> None:
        """The row goes first: there is one if the database's answer was lost, or if only the caller did not wait."""
        await asyncio.gather(adding, return_exceptions=True)
        try:
            await self._erase(voice)
            await shared.delete(voice.id)
        except ApiError:  # which is logged; a sample without a row is swept later
            log.error("the sample of a voice may be left", voice=voice.id)

    async def all_of(self, owner: str | None) -> list[UploadedVoice]:
        """The owner's voices in order of creation; None sees all."""
        found = select(*_COLUMNS).where(owned_by(owner, voices.c.owner)).order_by(voices.c.sequence)
        return await self.read(lambda connection: [_voice_of(row) for row in connection.execute(found)])

    async def find(self, named: str, owner: str | None) -> UploadedVoice | None:
        """The owner's voice by its id, else by its name."""
        by_id = voices.c.id == named
        is_meant = or_(by_id, voices.c.folded_name == named.casefold())
        found = select(*_COLUMNS).where(is_meant, owned_by(owner, voices.c.owner))
        first = found.order_by(case((by_id, 0), else_=1), voices.c.sequence).limit(1)
        row = await self.read(lambda connection: connection.execute(first).first())
        return None if row is None else _voice_of(row)

    async def sample(self, voice: UploadedVoice) -> bytes | None:
        """The sample's FLAC file; None: removed."""
        found = select(voices.c.sample).where(voices.c.id == voice.id)
        flac = await self.read(lambda connection: connection.execute(found).scalar())
        if flac != _BLOB:
            return flac
        pieces = None if self._shared is None else await self._shared.open(voice.id)
        if pieces is None:
            log.error("the sample of a voice is gone", voice=voice.id)
            return None
        async with aclosing(pieces):
            return b"".join([piece async for piece in pieces])

    async def remove(self, voice: UploadedVoice) -> None:
        """The sample goes first: while its place is away, the row stays for the next try."""
        if self._shared is not None:
            await self._shared.delete(voice.id)
        await self._erase(voice)

    async def _erase(self, voice: UploadedVoice) -> None:
        await self.erase(lambda connection: connection.execute(delete(voices).where(voices.c.id == voice.id)))

    async def sweep(self) -> None:
        """Removes samples without a row."""
        if self._shared is not None:
            await self._known(())  # the place's space is known from the first use on
            await self._shared.sweep(self._known)

    async def _known(self, ids: Sequence[str]) -> set[str]:
        """Those of `ids` that there are."""
        these = select(voices.c.id).where(voices.c.id.in_(ids))
        return await self.read(lambda connection: set(connection.execute(these).scalars()))


def voice_store(settings: GatewaySettings, database: Database | None) -> VoiceStore:
    """The voices of a gateway. Raises StoreError."""
    blobs = shared_blobs_of(settings, database)
    return VoiceStore(database or settings.voices_dir, settings.max_voices, settings.max_voices_per_key, blobs)


async def _whole(content: bytes) -> AsyncIterator[bytes]:
    yield content


def _count(connection: Connection, *where: ColumnElement[bool]) -> int:
    return connection.execute(select(func.count()).select_from(voices).where(*where)).scalar_one()


def _voice_of(row: Row) -> UploadedVoice:
    return UploadedVoice(*row)  # fields and columns have one order


def _too_many(whose: str, most: int, setting: str) -> ApiError:
    message = f"{whose} {most} voices, as many as may be; delete one, or have the operator raise {setting}"
    return ApiError(400, message, None, "too_many_voices")
