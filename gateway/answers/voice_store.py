"""Uploaded voices in SQLite, a row each with its sample."""

from dataclasses import astuple, dataclass, fields
from pathlib import Path

from gateway.errors import ApiError
from gateway.store import ClientStore, required


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


_COLUMNS = ", ".join(field.name for field in fields(UploadedVoice))
_VISIBLE = "coalesce(owner, '') = coalesce(?, owner, '')"
# Directories keep this schema: a new field of UploadedVoice needs a new version and a migration.
# Two gateways may make it at the same time.
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS voices (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, -- order of creation: a second can have several
    id TEXT NOT NULL UNIQUE, name TEXT NOT NULL COLLATE NOCASE, consent TEXT NOT NULL, text TEXT NOT NULL,
    seconds REAL NOT NULL, created_at INTEGER NOT NULL, owner TEXT,
    sample BLOB NOT NULL -- a FLAC file: a voice is complete or absent, and no file is left over
);
PRAGMA user_version = 1;
COMMIT;
"""


class VoiceStore(ClientStore):
    """The voices of one directory, which gateways of one machine may share. No `directory` is a StoreError."""

    name, setting, fault = "voices", "voices_dir", "uploaded voices cannot be read or written"
    schema = _SCHEMA
    # Nothing of a deleted voice stays in the file. No write-ahead log: it would keep what was deleted for longer.
    pragmas = ("auto_vacuum = FULL",)

    def __init__(self, directory: Path | None, most: int, most_of_owner: int) -> None:
        super().__init__(required(directory, self.setting, self.name))
        self._most, self._most_of_owner = most, most_of_owner

    async def add(self, voice: UploadedVoice, flac: bytes) -> None:
        """Raises ApiError: 409, the owner has a voice of that name; 400, there is no room."""

        def write() -> None:
            with self.database:
                self.database.execute("BEGIN IMMEDIATE")  # nobody adds another one in between
                if self._count(f"WHERE name = ? AND {_VISIBLE}", voice.name, voice.owner):
                    message = f"name: there is a voice {voice.name!r}; delete it first, or choose another name"
                    raise ApiError(409, message, "name", "voice_exists")
                if voice.owner and self._count("WHERE owner = ?", voice.owner) >= self._most_of_owner:
                    raise _too_many("this API key has", self._most_of_owner, "max_voices_per_key")
                if self._count("") >= self._most:
                    raise _too_many("this server keeps", self._most, "max_voices")
                marks = ", ".join("?" * (len(fields(UploadedVoice)) + 1))
                values = (*astuple(voice), flac)
                self.database.execute(f"INSERT INTO voices ({_COLUMNS}, sample) VALUES ({marks})", values)

        await self.run(write)

    async def all_of(self, owner: str | None) -> list[UploadedVoice]:
        """The owner's voices in order of creation; None sees all."""
        where = f"WHERE {_VISIBLE} ORDER BY sequence"
        return [UploadedVoice(*row) for row in await self.rows(f"SELECT {_COLUMNS} FROM voices {where}", (owner,))]

    async def find(self, named: str, owner: str | None) -> UploadedVoice | None:
        """The owner's voice by its id, else by its name."""
        where = f"WHERE (id = ? OR name = ?) AND {_VISIBLE} ORDER BY id = ? DESC, sequence LIMIT 1"
        rows = await self.rows(f"SELECT {_COLUMNS} FROM voices {where}", (named, named, owner, named))
        return UploadedVoice(*rows[0]) if rows else None

    async def sample(self, voice: UploadedVoice) -> bytes | None:
        """The sample's FLAC file; None: removed."""
        rows = await self.rows("SELECT sample FROM voices WHERE id = ?", (voice.id,))
        return rows[0][0] if rows else None

    async def remove(self, voice: UploadedVoice) -> None:
        await self.delete("DELETE FROM voices WHERE id = ?", (voice.id,))

    def _count(self, where: str, *values: str | None) -> int:
        return self.database.execute(f"SELECT count(*) FROM voices {where}", values).fetchone()[0]


def _too_many(whose: str, most: int, setting: str) -> ApiError:
    message = f"{whose} {most} voices, as many as may be; delete one, or have the operator raise {setting}"
    return ApiError(400, message, None, "too_many_voices")
