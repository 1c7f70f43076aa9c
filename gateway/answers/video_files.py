"""Files of videos. A finished video's is complete or absent."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path

from gateway.store.row_blobs import RowBlobs

_MAX_INPUTS = 2  # an image or a video, and a control video
_ORPHANED_S = 3600.0  # a job's files are there before its row is, which takes seconds
_READ_BYTES = 1024 * 1024


class VideoFiles:
    """The files of all jobs: those of unfinished ones in a directory; the finished videos in there, too, or in a place
    of many gateways. Gateways may share the directory.

    Args:
        shared: the place of finished videos, by id; None: the directory. Videos of before, in the directory, count all
            the same.

    Raises:
        OSError: from every method that removes.
        ApiError: from every asynchronous method: 500, the place cannot be used; 503, it cannot be reached.
    """

    def __init__(self, directory: Path, shared: RowBlobs | None) -> None:
        self.directory, self._shared = directory, shared

    def file(self, video_id: str) -> Path:
        return self.directory / f"{video_id}.mp4"

    def part(self, video_id: str) -> Path:
        """Place of the file while it is written."""
        return self.directory / f"{video_id}.part"

    def inputs(self, video_id: str) -> list[Path]:
        """Places for the files that come with a waiting job."""
        return [self.directory / f"{video_id}.{number}.input" for number in range(_MAX_INPUTS)]

    def finish(self, video_id: str) -> None:
        """Has the part, which is complete, in the directory as a finished video, if that is its place. Blocking."""
        if self._shared is None:
            self.part(video_id).replace(self.file(video_id))

    async def share(self, video_id: str) -> None:
        """Puts the part, which is complete, where other gateways find it, if there is such a place. If this raises, or
        is cancelled, nothing is there."""
        if self._shared is not None:
            async with aclosing(_pieces_of(self.part(video_id))) as pieces:
                await self._shared.put(video_id, pieces)

    async def here(self, video_id: str) -> Path | None:
        """A finished video's file, if it is in the directory."""
        path = self.file(video_id)
        return path if await asyncio.to_thread(path.is_file) else None

    async def size(self, video_id: str) -> int | None:
        """Of a finished video in the shared place. None: it is not there."""
        return None if self._shared is None else await self._shared.size(video_id)

    async def open(self, video_id: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None] | None:
        """As `size`; its bytes from `start` to before `end`, or to its own."""
        return None if self._shared is None else await self._shared.open(video_id, start, end)

    async def read(self, video_id: str) -> bytes | None:
        """A finished video, wherever it is. None: it is not there."""
        if path := await self.here(video_id):
            return await asyncio.to_thread(path.read_bytes)
        if (pieces := await self.open(video_id)) is None:
            return None
        async with aclosing(pieces):
            return b"".join([piece async for piece in pieces])

    async def remove(self, video_id: str) -> None:
        await asyncio.to_thread(self.remove_here, video_id)
        await self.remove_shared(video_id)

    async def remove_shared(self, video_id: str) -> None:
        """What is in the shared place."""
        if self._shared is not None:
            await self._shared.delete(video_id)

    def remove_here(self, video_id: str) -> None:
        """What is in the directory."""
        self.file(video_id).unlink(missing_ok=True)
        self.remove_unfinished(video_id)

    def remove_unfinished(self, video_id: str) -> None:
        """What is in the directory, but for the finished video's."""
        for path in (self.part(video_id), *self.inputs(video_id)):
            path.unlink(missing_ok=True)

    def remove_orphans(self, known: Mapping[str, str]) -> None:
        """Removes from the directory what a gateway left that ended in the middle.

        Args:
            known: the state of each job, by id. Files of others may be those of a job that is just taken on, if they
                are young.
        """
        before = time.time() - _ORPHANED_S
        for path in self.directory.glob("video_*"):
            if path.suffix not in (".mp4", ".part", ".input"):
                continue
            match known.get(path.name.partition(".")[0]):
                case None:
                    is_left = path.lstat().st_mtime < before
                case "completed":
                    is_left = path.suffix != ".mp4"
                case state:
                    is_left = state == "failed"
            if is_left:
                path.unlink(missing_ok=True)


async def _pieces_of(path: Path) -> AsyncGenerator[bytes, None]:
    with await asyncio.to_thread(path.open, "rb") as file:
        while piece := await asyncio.to_thread(file.read, _READ_BYTES):
            yield piece
