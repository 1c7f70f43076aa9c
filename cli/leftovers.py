"""Ends a process group without leaving its shared memory behind."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

from services.common.stream.arena_files import sweep

PATIENCE_S = 5.0
SHARED_MEMORY = Path("/dev/shm")
# Intel's OpenMP runtime, preloaded into the thinker on a CPU, registers itself in such a file; killed, it leaves it.
_OPENMP_FILE = re.compile(r"__KMP_REGISTERED_LIB_(\d+)_\d+")


def end_group(group: int) -> None:
    """Returns when no process of `group` is left. Its leader must have ended, or been told to.

    vLLM's processes notice that their parent is gone, and Python's resource tracker then removes their shared memory;
    killed at once it could not. What is left after `PATIENCE_S` is killed.
    """
    end = time.monotonic() + PATIENCE_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.02)
        os.killpg(group, signal.SIGKILL)


def sweep_shared_memory() -> None:
    """Removes what killed processes of this user left in /dev/shm: files named after a process that is no more, and the
    arenas of stages."""
    sweep(SHARED_MEMORY)
    for file in SHARED_MEMORY.glob("__KMP_REGISTERED_LIB_*"):
        found = _OPENMP_FILE.fullmatch(file.name)
        with contextlib.suppress(OSError):
            if found and file.stat().st_uid == os.getuid() and not Path("/proc", found[1]).exists():
                file.unlink()
