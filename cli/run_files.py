"""Run directories of `quartet up`: one server at a time, and logs that survive a failed start."""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from cli.plan import LaunchError

LEAST_FREE_BYTES = 16 * 2**20  # for logs, which say why a start failed
FAILED_PREFIX = "quartet-failed-"
KEPT_S = 24 * 3600.0


def lock(directory: Path) -> int:
    """Locks `directory` until the returned descriptor is closed. Raises LaunchError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _check_room(directory)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise LaunchError(f"--run-dir {directory}: {error.strerror}; name a folder that can be written") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LaunchError(f"--run-dir {directory}: {_url_there(directory)} has it; name another folder") from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def temporary(prefix: str) -> Path:
    """Raises LaunchError."""
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        where = Path(error.filename).parent if error.filename else "TMPDIR"
        raise LaunchError(f"{where}: {error.strerror}; name another folder for temporary files by TMPDIR") from None


def keep_logs(run_directory: Path) -> Path:
    """Copies a temporary run directory's logs and removes old copies. Returns the copy."""
    parent = Path(tempfile.gettempdir())
    for old in parent.glob(f"{FAILED_PREFIX}*"):
        with contextlib.suppress(OSError):
            if old.stat().st_uid == os.getuid() and time.time() - old.stat().st_mtime > KEPT_S:
                shutil.rmtree(old, ignore_errors=True)
    try:
        kept = Path(tempfile.mkdtemp(prefix=FAILED_PREFIX))
        for log in run_directory.glob("*.log"):
            shutil.copy(log, kept)
    except OSError:
        return run_directory
    return kept


def _check_room(directory: Path) -> None:
    if not os.access(directory, os.W_OK | os.X_OK):
        raise LaunchError(f"--run-dir {directory}: Permission denied; name a folder that can be written")
    stat = os.statvfs(directory)
    if (free := stat.f_bavail * stat.f_frsize) < LEAST_FREE_BYTES:
        raise LaunchError(
            f"{directory}: the disk is full, {free / 2**20:.0f} MiB are free and logs need "
            f"{LEAST_FREE_BYTES / 2**20:.0f}: make room there, or name another folder by --run-dir"
        )


def _url_there(directory: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        if url := json.loads((directory / "state.json").read_text()).get("url"):
            return f"the server at {url}"
    return "another `quartet up`"
