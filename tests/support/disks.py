"""Disks that are full: a real file system of some MiB, in memory."""

import contextlib
import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(at: Path, mib: int) -> Iterator[Path]:
    """A file system of `mib` at the directory `at`, which is made. Skips the test where none can be mounted."""
    at.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(at)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def fill(disk: Path) -> Path:
    """Fills a small disk to its last byte: the file that does."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size_bytes in (65536, 4096, 1):
            try:
                while True:
                    file.write(bytes(size_bytes))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return filler
