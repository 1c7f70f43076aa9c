"""Transcripts of spoken answers in a database, so that any of its gateways knows an audio id."""

import time
from collections.abc import Collection
from pathlib import Path

from sqlalchemy import BigInteger, Column, Connection, Index, MetaData, Table, Text, delete, insert, select

from gateway.store.database import Database
from gateway.store.store import ClientStore

_SWEEP_S = 60.0

tables = MetaData()
transcripts = Table(
    "transcripts",
    tables,
    Column("audio_id", Text, primary_key=True),
    Column("expires_at", BigInteger, nullable=False),  # Unix seconds
    Column("transcript", Text, nullable=False),
    Index("transcripts_by_end", "expires_at"),
)


class TranscriptStore(ClientStore):
    """Raises ApiError from every method: 500, the database cannot be used; 503, it cannot be reached."""

    name, setting, fault = "transcripts", "database_url", "earlier spoken answers cannot be stored or read"
    tables = tables

    def __init__(self, place: Database | Path) -> None:
        super().__init__(place)
        self._swept_s = -float("inf")

    async def put(self, audio_id: str, expires_at: int, transcript: str) -> None:
        is_time = time.monotonic() - self._swept_s > _SWEEP_S
        if is_time:
            self._swept_s = time.monotonic()

        def put(connection: Connection) -> None:
            values = {"audio_id": audio_id, "expires_at": expires_at, "transcript": transcript}
            connection.execute(insert(transcripts).values(values))
            if is_time:
                connection.execute(delete(transcripts).where(transcripts.c.expires_at <= time.time()))

        await self.write(put)

    async def find(self, audio_ids: Collection[str]) -> list[tuple[str, int, str]]:
        """(audio id, Unix time at which it expires, transcript) of those that are known."""
        known = transcripts.c.audio_id.in_(audio_ids) & (transcripts.c.expires_at > time.time())
        found = select(transcripts).where(known)
        return await self.read(lambda connection: [tuple(row) for row in connection.execute(found)])
