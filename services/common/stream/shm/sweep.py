"""Removes the arenas that killed processes left. Free of torch: the command line sweeps too."""

import contextlib
import fcntl
import os
from pathlib import Path

from services.common.stream.shm.names import OPEN_FLAGS, is_arena_name, is_own_file


def sweep(directory: Path) -> int:
    """Removes every arena of this user in `directory` whose process is gone; returns how many there were.

    A producer holds a lock on its arena from before the file has a name until the process ends, however it ends. So one
    that can be locked has no owner, in whatever pid namespace or container that was.
    """
    removed = 0
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if is_arena_name(entry.name):
                with contextlib.suppress(OSError):  # its producer lives, or another sweep was first
                    removed += _remove_if_orphaned(entry.path)
    return removed


def _remove_if_orphaned(path: str) -> bool:
    file = os.open(path, OPEN_FLAGS)
    try:
        if not is_own_file(os.fstat(file)):
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    finally:
        os.close(file)
