"""A directory for the temporary files of vLLM's processes, which leave them behind when they are killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from services.thinker.plugin import SCRATCH_DIR

PREFIX = "quartet-thinker-"


@contextlib.contextmanager
def scratch_dir() -> Iterator[Path]:
    """While the context is open, temporary files of this process and its children go to a directory of their own. It
    goes with the context, with the engine where this process is killed, and else with the next thinker here."""
    parent = tempfile.gettempdir()
    before = {name: os.environ.get(name) for name in ("TMPDIR", SCRATCH_DIR)}
    path, lock = _make(Path(parent))
    os.environ["TMPDIR"] = os.environ[SCRATCH_DIR] = tempfile.tempdir = str(path)
    try:
        yield path
    finally:
        del os.environ["TMPDIR"], os.environ[SCRATCH_DIR]
        os.environ |= {name: value for name, value in before.items() if value is not None}
        tempfile.tempdir = parent
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _make(parent: Path) -> tuple[Path, int]:
    """A new directory, and the descriptor that keeps it locked; those that nobody holds any more are removed."""
    for orphan in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody's
            lock = _lock(orphan, fcntl.LOCK_NB)
            shutil.rmtree(orphan, ignore_errors=True)
            os.close(lock)
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError):  # another thinker has taken it for an orphan
            lock = _lock(path)
            if path.exists():
                return path, lock
            os.close(lock)


def _lock(directory: Path, flags: int = 0) -> int:
    """A descriptor that holds the lock of `directory` until it is closed, by the end of this process at the latest.

    Raises:
        OSError: there is no such directory; with LOCK_NB among the `flags` also: another process holds it.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
