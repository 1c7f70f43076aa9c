"""Ends what a killed `quartet up` leaves behind: `python -P -m cli.reaper [DIRECTORY]`, started by the supervisor.

PR_SET_PDEATHSIG reaches direct children only, and vLLM has children of its own. The supervisor writes the id of each
process group to a pipe; when the pipe ends, the reaper kills the groups and removes the directory.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakSet

from services.common.stream.arena_files import sweep

PATIENCE_S = 5.0
SHARED_MEMORY = Path("/dev/shm")
# Intel's OpenMP runtime, preloaded into the thinker on a CPU, registers itself in such a file; killed, it leaves it.
_OPENMP_FILE = re.compile(r"__KMP_REGISTERED_LIB_(\d+)_\d+")


class Reaper:
    """The supervisor's side. `directory` is removed when the supervisor has ended."""

    def __init__(self, directory: Path | None = None) -> None:
        _reapers.add(self)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli.reaper", *([str(directory)] if directory else [])],
            bufsize=0,
            stdin=subprocess.PIPE,
            process_group=0,  # ctrl-C on the terminal is not for the reaper
        )
        assert self._process.stdin
        self.pipe = self._process.stdin

    def watch(self, group: int) -> None:
        """Has the group killed when this process ends."""
        self._write(f"+{group}\n")

    def forget(self, group: int) -> None:
        """To be called when a group has ended: its id may be reused."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """Waits until the watched groups are killed and the directory is removed."""
        self.pipe.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # someone killed the reaper; serving goes on without it
            self.pipe.write(line.encode())


_reapers: WeakSet[Reaper] = WeakSet()


def _let_go() -> None:
    """Closes the pipe in a forked process: held open, it would outlive the supervisor."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for reaper in _reapers:
        with contextlib.suppress(AttributeError, ValueError):  # the pipe has not been opened, or is closed
            os.dup2(nothing, reaper.pipe.fileno(), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)


def waits_for(group: int) -> Iterator[float]:
    """Yields seconds to sleep until no process of `group` is left. Its leader must have ended or been signalled.

    vLLM's processes notice that their parent is gone, and Python's resource tracker removes their shared memory. What
    is left after `PATIENCE_S` is killed.
    """
    end = time.monotonic() + PATIENCE_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            yield 0.02
        os.killpg(group, signal.SIGKILL)


def end_group(group: int) -> None:
    """Blocks as long as `waits_for`."""
    for pause_s in waits_for(group):
        time.sleep(pause_s)


def sweep_shared_memory() -> None:
    """Removes what killed processes of this user left."""
    sweep(SHARED_MEMORY)
    for file in SHARED_MEMORY.glob("__KMP_REGISTERED_LIB_*"):
        found = _OPENMP_FILE.fullmatch(file.name)
        with contextlib.suppress(OSError):
            if found and file.stat().st_uid == os.getuid() and not Path("/proc", found[1]).exists():
                file.unlink()


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        end_group(group)
    sweep_shared_memory()
    for directory in sys.argv[1:]:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
