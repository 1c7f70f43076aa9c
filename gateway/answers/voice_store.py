"""Uploaded voices, a row each with its sample."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from sqlalchemy import ColumnElement, Connection, Row, case, delete, func, insert, or_, select

from gateway.answers.voice_tables import tables, voices
from gateway.errors import ApiError
from gateway.store.database import Database
from gateway.store.errors import required
from gateway.store.queries import owned_by
from gateway.store.store import ClientStore


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


class VoiceStore(ClientStore):
    """The voices of one place, which several gateways may share.

    Args:
        place: as of `Store`, but None is a StoreError.
        most: voices of all owners.
    """

    name, setting, fault = "voices", "voices_dir", "uploaded voices cannot be read or written"
    tables = tables
    # Nothing of a deleted voice stays in the file. No write-ahead log: it would keep what was deleted for longer.
    pragmas = ("auto_vacuum = FULL",)

    def __init__(self, place: Database | Path | None, most: int, most_of_owner: int) -> None:
        super().__init__(place if isinstance(place, Database) else required(place, self.setting, self.name))
        self._most, self._most_of_owner = most, most_of_owner

    async def add(self, voice: UploadedVoice, flac: bytes) -> None:
        """Raises ApiError: 409, the owner has a voice of that name; 400, there is no room."""
        folded = voice.name.casefold()
        row = asdict(voice) | {"sample": flac, "folded_name": folded}

        def add(connection: Connection) -> None:
            self.database.lock(connection, self.name)  # nobody adds another one in between
            if _count(connection, voices.c.folded_name == folded, owned_by(voice.owner, voices.c.owner)):
                message = f"name: there is a voice {voice.name!r}; delete it first, or choose another name"
                raise ApiError(409, message, "name", "voice_exists")
            if voice.owner and _count(connection, voices.c.owner == voice.owner) >= self._most_of_owner:
                raise _too_many("this API key has", self._most_of_owner, "max_voices_per_key")
            if _count(connection) >= self._most:
                raise _too_many("this server keeps", self._most, "max_voices")
            connection.execute(insert(voices).values(row))

        await self.write(add)

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
        return await self.read(lambda connection: connection.execute(found).scalar())

    async def remove(self, voice: UploadedVoice) -> None:
        await self.erase(lambda connection: connection.execute(delete(voices).where(voices.c.id == voice.id)))


def _count(connection: Connection, *where: ColumnElement[bool]) -> int:
    return connection.execute(select(func.count()).select_from(voices).where(*where)).scalar_one()


def _voice_of(row: Row) -> UploadedVoice:
    return UploadedVoice(*row)  # fields and columns have one order


def _too_many(whose: str, most: int, setting: str) -> ApiError:
    message = f"{whose} {most} voices, as many as may be; delete one, or have the operator raise {setting}"
    return ApiError(400, message, None, "too_many_voices")
