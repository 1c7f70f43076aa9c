"""Ends what a killed `quartet up` leaves behind: `python -P -m cli.reaper [DIRECTORY]`, started by the supervisor.

PR_SET_PDEATHSIG reaches the direct children only, and vLLM has children of its own. The reaper holds the reading end of
a pipe on which the supervisor writes the id of each process group that it starts. The end of the file means that the
supervisor is gone, however it went. The reaper then kills the groups and removes the temporary directory.
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
    """The supervisor's side.

    Args:
        directory: is removed when the supervisor has ended; None: nothing is.
    """

    def __init__(self, directory: Path | None = None) -> None:
        _reapers.add(self)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli.reaper", *([str(directory)] if directory else [])],
            stdin=subprocess.PIPE,
            process_group=0,  # ctrl-C on the terminal is not for the reaper
        )

    def watch(self, group: int) -> None:
        """Has the process group `group` killed when this process ends."""
        self._write(f"+{group}\n")

    def forget(self, group: int) -> None:
        """The group has been ended, so that its id may come to mean something else."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """Has what is still watched killed, and waits until that is done and the directory is gone."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def let_go(self, nothing: int) -> None:
        """Has the pipe's descriptor stand for `nothing`, another one."""
        with contextlib.suppress(AttributeError, ValueError):  # it has not been opened, or is closed
            assert self._process.stdin
            os.dup2(nothing, self._process.stdin.fileno(), inheritable=False)

    def _write(self, line: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # someone killed the reaper; serving goes on without it
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


_reapers: WeakSet[Reaper] = WeakSet()


def _let_go() -> None:
    """In a process forked from the supervisor's: a pipe that it held open too would not end with the supervisor."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for reaper in _reapers:
        reaper.let_go(nothing)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)


def waits_for(group: int) -> Iterator[float]:
    """Seconds to sleep, again and again until no process of `group` is left. Its leader must have ended, or been told
    to.

    vLLM's processes notice that their parent is gone, and Python's resource tracker then removes their shared memory;
    killed at once it could not. What is left after `PATIENCE_S` is killed.
    """
    end = time.monotonic() + PATIENCE_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            yield 0.02
        os.killpg(group, signal.SIGKILL)


def end_group(group: int) -> None:
    """Returns when no process of `group` is left; see `waits_for`."""
    for pause_s in waits_for(group):
        time.sleep(pause_s)


def sweep_shared_memory() -> None:
    """Removes what killed processes of this user left in /dev/shm: files named after a process that is no more, and the
    arenas of stages."""
    sweep(SHARED_MEMORY)
    for file in SHARED_MEMORY.glob("__KMP_REGISTERED_LIB_*"):
        found = _OPENMP_FILE.fullmatch(file.name)
        with contextlib.suppress(OSError):
            if found and file.stat().st_uid == os.getuid() and not Path("/proc", found[1]).exists():
                file.unlink()


def main() -> None:
    """Reads group ids until the supervisor is gone, then kills the groups."""
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
