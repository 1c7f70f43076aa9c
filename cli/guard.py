"""Ends what a killed `quartet up` leaves behind: `python -m cli.guard`, started by the supervisor.

PR_SET_PDEATHSIG reaches the direct children only, and vLLM has children of its own. The guard holds the reading end of
a pipe on which the supervisor writes the id of each process group it starts. The end of the file means that the
supervisor is gone, however it went; the groups are then killed.
"""

import contextlib
import subprocess
import sys

from cli.leftovers import end_group, sweep_shared_memory


class Guard:
    """The supervisor's side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cli.guard"],
            stdin=subprocess.PIPE,
            process_group=0,  # ctrl-C on the terminal is not for the guard
        )

    def watch(self, group: int) -> None:
        """Has the process group `group` killed when this process ends."""
        self._write(f"+{group}\n")

    def forget(self, group: int) -> None:
        """The group has been ended, so that its id may come to mean something else."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """Ends the guard, which kills what is still watched."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # someone killed the guard; serving goes on without it
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def main() -> None:
    """Reads group ids until the supervisor is gone, then kills the groups."""
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        end_group(group)
    sweep_shared_memory()


if __name__ == "__main__":
    main()
