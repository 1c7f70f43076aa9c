"""Whether a file is another one than it was."""

from pathlib import Path

FileVersion = tuple[int, int, int] | None


def file_version(file: Path) -> FileVersion:
    """Inode, time of the last change in nanoseconds, and size in bytes; None while there is no such file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
