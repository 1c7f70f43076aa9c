"""Video jobs: a row each in a database, and files."""

import asyncio
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import structlog
from sqlalchemy import ColumnElement, Connection, Row, Select, Update, delete, insert, or_, select, true, update

from gateway.answers.video_files import VideoFiles
from gateway.answers.video_tables import spaces, tables, videos
from gateway.errors import ApiError
from gateway.settings import GatewaySettings
from gateway.store.blobs import Blobs
from gateway.store.clock import lease_end, now
from gateway.store.columns import fits
from gateway.store.database import Database
from gateway.store.errors import StoreError, required
from gateway.store.queries import owned_by
from gateway.store.row_blobs import BlobStore, RowBlobs, shared_blobs_of
from gateway.store.sqlite import file_of

Status = Literal["queued", "in_progress", "completed", "failed"]

_UNFINISHED = ("queued", "in_progress")
_INTERRUPTED = "the server stopped before the video was finished; send the request again"

log = structlog.get_logger()


@dataclass
class VideoJob:
    """Times are Unix seconds; `expires_at` is set at its end. `owner` names the API key that made it. `remixed_from` is
    the id of the video that it is made from."""

    id: str
    model: str
    prompt: str
    status: Status
    progress: int
    created_at: int
    width: int
    height: int
    frames: int
    frames_per_second: float
    completed_at: int | None = None
    expires_at: float | None = None
    seed: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    owner: str | None = None
    remixed_from: str | None = None


_COLUMNS = [videos.c[field.name] for field in fields(VideoJob)]


class LeaseLost(Exception):
    """The job was deleted, or ended by another gateway, as this one did not renew its lease."""


class VideoStore(BlobStore):
    """The videos of one place, which several gateways may share. An unfinished one belongs to the gateway that took it
    on, its holder, for as long as that renews its lease. Any gateway that finds it later fails it.

    Args:
        place: as of `Store`, but None is a StoreError.
        ttl_s: how long a video is kept after its end.
        directory: of files, which gateways of the place may share; None: `place`.
        blobs: where all gateways of the place find finished videos; None: in the directory, which they share.

    Attributes:
        holder: this gateway's name, which no other process has.
        live: its unfinished jobs by id, with progress that is not stored yet.

    Raises:
        ApiError: from every method: 500, the place cannot be used; 503, it cannot be reached.
    """

    name, setting, fault = "videos", "jobs_dir", "videos cannot be stored or read"
    tables, spaces = tables, spaces

    def __init__(
        self,
        place: Database | Path | None,
        ttl_s: float,
        directory: Path | None = None,
        blobs: Blobs | None = None,
    ) -> None:
        if directory is None and not isinstance(place, Database):
            directory = place
        shared = None if blobs is None else RowBlobs(blobs, self)
        self._shared, self.files = shared, VideoFiles(required(directory, self.setting, self.name), shared)
        super().__init__(place if isinstance(place, Database) else required(place, self.setting, self.name))
        self.ttl_s, self.holder = ttl_s, uuid.uuid4().hex
        self.live: dict[str, VideoJob] = {}

    async def add(self, video: VideoJob) -> None:
        """A new job, held by this gateway."""
        row = _values(video)

        def add(connection: Connection) -> None:
            held = {"holder": self.holder, "held_until": lease_end(connection)}
            connection.execute(insert(videos).values(row | held))

        await self.write(add)

    async def end(self, video: VideoJob) -> None:
        """Stores a held job's end. Raises LeaseLost: nothing is changed, the job is not held any more."""
        values = _values(video) | {"holder": None, "held_until": None}

        def end(connection: Connection) -> bool:
            if connection.execute(self._held(video.id).values(values)).rowcount:
                return True
            status = connection.execute(select(videos.c.status).where(videos.c.id == video.id)).scalar()
            return status == video.status == "completed"  # a try before did it, and its answer was lost

        if not await self.write(end):
            raise LeaseLost

    async def keep(self, held: Collection[str], changed: Collection[VideoJob], renews: bool) -> set[str]:
        """Stores how far held jobs are, and renews the leases of all.

        Returns:
            those of the ids `held` that are still held.
        """
        rows = [_values(video) for video in changed]

        def keep(connection: Connection) -> set[str]:
            these = videos.c.id.in_(held), videos.c.holder == self.holder
            for row in rows:
                connection.execute(self._held(row["id"]).values(row))
            if renews:
                connection.execute(update(videos).where(*these).values(held_until=lease_end(connection)))
            return set(connection.execute(select(videos.c.id).where(*these)).scalars())

        return await (self.write(keep) if rows or renews else self.read(keep))

    def _held(self, video_id: str) -> Update:
        return update(videos).where(videos.c.id == video_id, videos.c.holder == self.holder)

    async def give_up(self) -> None:
        """Fails all jobs that are held."""
        await self._discard(await self.write(lambda connection: self._interrupt(connection, self._is_mine())))

    async def end_lost(self) -> None:
        """Fails the jobs of which the leases are over."""
        await self._discard(await self.write(self._interrupt_lost))

    def _interrupt_lost(self, connection: Connection) -> list[str]:
        is_over = or_(videos.c.held_until.is_(None), videos.c.held_until < now(connection))
        lost = self._interrupt(connection, is_over, videos.c.id.not_in(list(self.live)))
        if lost:
            log.info("videos interrupted", videos=lost)
        return lost

    def _interrupt(self, connection: Connection, *where: ColumnElement[bool]) -> list[str]:
        """Ids of those that were not failed before."""
        ended = {"status": "failed", "error_code": "interrupted", "error_message": _INTERRUPTED}
        ended |= {"expires_at": time.time() + self.ttl_s, "holder": None, "held_until": None}
        these = update(videos).where(videos.c.status.in_(_UNFINISHED), *where)
        return list(connection.execute(these.values(ended).returning(videos.c.id)).scalars())

    def _is_mine(self) -> ColumnElement[bool]:
        return videos.c.holder == self.holder

    async def get(self, video_id: str, owner: str | None = None) -> VideoJob | None:
        """An owner sees only its own."""
        found = await self._read(select(videos).where(videos.c.id == video_id, *_visible(owner)))
        return found[0] if found else None

    async def page(
        self, after: str | None, limit: int, newest_first: bool, owner: str | None = None
    ) -> list[VideoJob] | None:
        """At most `limit` videos in order of creation, from the one after `after`; None: that does not exist."""
        sequence, beyond = videos.c.sequence, true()
        if after is not None:
            if await self.get(after, owner) is None:
                return None
            at = select(sequence).where(videos.c.id == after).scalar_subquery()
            beyond = sequence < at if newest_first else sequence > at
        ordered = sequence.desc() if newest_first else sequence.asc()
        return await self._read(select(videos).where(*_visible(owner), beyond).order_by(ordered).limit(limit))

    async def remove(self, video_id: str) -> None:
        """What is shared first: while its place is away, the row stays for the next try. Then the row: its holder,
        wherever it is, stores nothing more, and removes what it has put there meanwhile."""
        await self.files.remove_shared(video_id)
        await self.erase(lambda connection: connection.execute(delete(videos).where(videos.c.id == video_id)))
        await asyncio.to_thread(self.files.remove_here, video_id)

    async def remove_expired(self) -> int:
        """Returns their number."""
        expired = select(videos.c.id).where(videos.c.expires_at <= time.time())
        ids = await self.read(lambda connection: connection.execute(expired).scalars().all())
        for video_id in ids:
            await self.remove(video_id)
        return len(ids)

    async def _read(self, found: Select[Any]) -> list[VideoJob]:
        """A gateway that reads ends what is lost."""

        def read(connection: Connection) -> tuple[list[VideoJob], bool]:
            rows = connection.execute(found).all()
            others = [row for row in rows if row.status in _UNFINISHED and row.id not in self.live]
            is_lost = bool(others) and min(row.held_until or 0 for row in others) < now(connection)
            return [self._video_of(row) for row in rows], is_lost

        read_videos, is_lost = await self.read(read)
        if is_lost:
            with suppress(ApiError):  # logged; a full disk can be read nevertheless
                await self.end_lost()
                read_videos, _ = await self.read(read)
        return read_videos

    def _video_of(self, row: Row[Any]) -> VideoJob:
        live = self.live.get(row.id)
        if live is not None and row.holder == self.holder:
            return live
        return VideoJob(**{column.name: getattr(row, column.name) for column in _COLUMNS})

    async def _discard(self, ended: Collection[str]) -> None:
        for video_id in ended:
            try:
                await self.files.remove(video_id)
            except (OSError, ApiError):  # a sweep does it later
                log.exception("files of a video cannot be removed", video=video_id)

    def recover(self, connection: Connection) -> None:
        """Removes orphaned files of the directory."""
        super().recover(connection)
        try:
            self.files.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            kept = self._remove_orphans(connection)
        except OSError as error:
            raise StoreError(f"{self.setting} {self.files.directory}: cannot be used: {error}") from None
        log.info("videos", directory=str(self.files.directory), kept=kept)

    async def sweep(self) -> None:
        """Removes files that a gateway left that ended in the middle. Raises OSError, too."""
        await self.read(self._remove_orphans)
        if self._shared is not None:
            await self._shared.sweep(self._with_file)

    async def _with_file(self, ids: Collection[str]) -> set[str]:
        """Those of `ids` that have a file, or may soon have one."""
        these = select(videos.c.id).where(videos.c.id.in_(ids), videos.c.status != "failed")
        return await self.read(lambda connection: set(connection.execute(these).scalars()))

    def _remove_orphans(self, connection: Connection) -> int:
        """Returns the number of all videos."""
        rows = connection.execute(select(videos.c.id, videos.c.status)).all()
        if not self._is_moving():
            self.files.remove_orphans({row.id: row.status for row in rows})
        return len(rows)

    def _is_moving(self) -> bool:
        """Whether files may be those of a SQLite file here, whose rows are not in the database yet."""
        return not self._is_own and file_of(self.files.directory, self.name).exists()


def video_store(settings: GatewaySettings, database: Database | None) -> VideoStore:
    """The videos of a gateway. Raises StoreError."""
    blobs = shared_blobs_of(settings, database)
    return VideoStore(database or settings.jobs_dir, settings.video_ttl_s, settings.jobs_dir, blobs)


def _values(video: VideoJob) -> dict[str, Any]:
    """What a stage says may have characters that a column cannot have."""
    values = asdict(video)
    if video.error_message is not None and not fits(video.error_message):
        values["error_message"] = video.error_message.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return values


def _visible(owner: str | None) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    is_kept = or_(videos.c.expires_at.is_(None), videos.c.expires_at > time.time())
    return is_kept, owned_by(owner, videos.c.owner)
