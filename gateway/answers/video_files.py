"""Files of videos in a directory. A finished video's is complete or absent."""

import time
from collections.abc import Collection
from pathlib import Path

_MAX_INPUTS = 2  # an image or a video, and a control video
_ORPHANED_S = 3600.0  # a job's files are there before its row is, which takes seconds


class VideoFiles:
    """The files of all jobs; gateways may share the directory. Methods are blocking.

    Raises:
        OSError: from every method that removes.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def file(self, video_id: str) -> Path:
        return self.directory / f"{video_id}.mp4"

    def part(self, video_id: str) -> Path:
        """Place of the file while it is written."""
        return self.directory / f"{video_id}.part"

    def inputs(self, video_id: str) -> list[Path]:
        """Places for the files that come with a waiting job."""
        return [self.directory / f"{video_id}.{number}.input" for number in range(_MAX_INPUTS)]

    def remove(self, video_id: str) -> None:
        self.file(video_id).unlink(missing_ok=True)
        self.remove_unfinished(video_id)

    def remove_unfinished(self, video_id: str) -> None:
        """All but the finished video's."""
        for path in (self.part(video_id), *self.inputs(video_id)):
            path.unlink(missing_ok=True)

    def remove_orphans(self, known: Collection[str]) -> None:
        """Removes old files of jobs that are not `known`, which a gateway left that ended in the middle."""
        before = time.time() - _ORPHANED_S
        for path in self.directory.glob("video_*"):
            is_ours = path.suffix in (".mp4", ".part", ".input")
            if is_ours and path.name.partition(".")[0] not in known and path.lstat().st_mtime < before:
                path.unlink(missing_ok=True)
