"""Video jobs in a directory: a SQLite row each, and files."""

import fcntl
import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import structlog

from gateway.store import Store, StoreError, required

Status = Literal["queued", "in_progress", "completed", "failed"]

_VISIBLE = "coalesce(expires_at > ?, 1) AND coalesce(owner, '') = coalesce(?, owner, '')"
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


_COLUMNS = [field.name for field in fields(VideoJob)]
# Directories keep this schema: a new field of VideoJob needs a new version and a migration.
_SCHEMA = """
BEGIN;
CREATE TABLE videos (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, -- order of creation: a second can have several
    id TEXT NOT NULL UNIQUE, model TEXT NOT NULL, prompt TEXT NOT NULL, status TEXT NOT NULL,
    progress INTEGER NOT NULL, created_at INTEGER NOT NULL, completed_at INTEGER, expires_at REAL,
    width INTEGER NOT NULL, height INTEGER NOT NULL, frames INTEGER NOT NULL, frames_per_second REAL NOT NULL,
    seed TEXT, -- up to 2^64 - 1, more than SQLite's integers
    error_code TEXT, error_message TEXT, owner TEXT, remixed_from TEXT
);
CREATE INDEX videos_by_end ON videos (expires_at);
PRAGMA user_version = 3;
COMMIT;
"""
# By a directory's version, the statements that lead to the next.
_MIGRATIONS = {
    1: "BEGIN; ALTER TABLE videos ADD COLUMN owner TEXT; PRAGMA user_version = 2; COMMIT;",
    2: "BEGIN; ALTER TABLE videos ADD COLUMN remixed_from TEXT; PRAGMA user_version = 3; COMMIT;",
}
_MAX_INPUTS = 2  # an image or a video, and a control video


class VideoStore(Store):
    """The videos of one directory, for one process at a time. Files are complete or absent.

    Args:
        directory: None is a StoreError.
        ttl_s: how long a video is kept after its end.

    Attributes:
        live: running jobs by id, with progress that is not worth a write to disk.
    """

    name, setting = "videos", "jobs_dir"
    schema, migrations = _SCHEMA, _MIGRATIONS
    pragmas = ("journal_mode = WAL",)

    def __init__(self, directory: Path | None, ttl_s: float) -> None:
        super().__init__(required(directory, self.setting, self.name))
        self.ttl_s = ttl_s
        self.live: dict[str, VideoJob] = {}

    def file(self, video_id: str) -> Path:
        return self.directory / f"{video_id}.mp4"

    def part(self, video_id: str) -> Path:
        return self.directory / f"{video_id}.part"

    def inputs(self, video_id: str) -> list[Path]:
        """Places for the files that come with a waiting job."""
        return [self.directory / f"{video_id}.{number}.input" for number in range(_MAX_INPUTS)]

    async def add(self, video: VideoJob) -> None:
        names, marks = ", ".join(_COLUMNS), ", ".join(f":{name}" for name in _COLUMNS)
        await self.write(f"INSERT INTO videos ({names}) VALUES ({marks})", asdict(video))

    async def save(self, video: VideoJob) -> None:
        changes = ", ".join(f"{name} = :{name}" for name in _COLUMNS)
        await self.write(f"UPDATE videos SET {changes} WHERE id = :id", asdict(video))

    async def get(self, video_id: str, owner: str | None = None) -> VideoJob | None:
        """An owner sees only its own."""
        found = await self._read(f"WHERE id = ? AND {_VISIBLE}", (video_id, time.time(), owner))
        return found[0] if found else None

    async def page(
        self, after: str | None, limit: int, newest_first: bool, owner: str | None = None
    ) -> list[VideoJob] | None:
        """At most `limit` videos in order of creation, from the one after `after`; None: that does not exist."""
        if after is not None and await self.get(after, owner) is None:
            return None
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        beyond = f"AND sequence {sign} (SELECT sequence FROM videos WHERE id = ?)" if after is not None else ""
        where = f"WHERE {_VISIBLE} {beyond} ORDER BY sequence {order} LIMIT ?"
        return await self._read(where, (time.time(), owner, *([after] if after is not None else ()), limit))

    async def remove(self, video_id: str) -> None:
        await self.delete("DELETE FROM videos WHERE id = ?", (video_id,))
        await self.run(_unlink, self.file(video_id), self.part(video_id), *self.inputs(video_id))

    async def remove_unfinished(self, video_id: str) -> None:
        await self.run(_unlink, self.part(video_id), *self.inputs(video_id))

    async def remove_expired(self) -> int:
        """Returns their number."""
        expired = await self._read("WHERE expires_at <= ?", (time.time(),))
        for video in expired:
            await self.remove(video.id)
        return len(expired)

    async def _read(self, where: str, values: tuple) -> list[VideoJob]:
        rows = await self.rows(f"SELECT {', '.join(_COLUMNS)} FROM videos {where}", values)
        videos = [VideoJob(*row) for row in rows]  # fields and columns have one order
        return [self.live.get(video.id, video) for video in videos]

    def take(self, opened: ExitStack) -> None:
        """Locks the directory; the lock ends with the process."""
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        opened.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "another gateway is using it; give each gateway a directory of its own"
            raise StoreError(f"jobs_dir {self.directory}: {reason}") from None

    def recover(self) -> None:
        """Ends an earlier process's jobs, and removes orphaned files."""
        now = time.time()
        with self.database:
            lost = self.database.execute(
                "UPDATE videos SET status = 'failed', error_code = 'interrupted', error_message = ?, expires_at = ? "
                "WHERE status IN ('queued', 'in_progress')",
                (_INTERRUPTED, now + self.ttl_s),
            ).rowcount
        rows = self.database.execute("SELECT id FROM videos WHERE status = 'completed'")
        kept = {self.file(video_id).name for (video_id,) in rows}
        for path in self.directory.glob("video_*"):
            if path.suffix in (".mp4", ".part", ".input") and path.name not in kept:
                path.unlink(missing_ok=True)
        log.info("videos", directory=str(self.directory), kept=len(kept), interrupted=lost)


def _unlink(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
