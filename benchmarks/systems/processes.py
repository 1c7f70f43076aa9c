"""What the processes of a running system use: CPU time and memory, children included (Linux)."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat, counted from the one after the command's name (proc(5)).
_PARENT, _GROUP = 1, 2
_TICKS_OF_ENDED_CHILDREN = slice(13, 15)  # user and system


def system_pids(run_directory: Path) -> dict[str, int]:
    """By name, the processes that a `quartet up` started; each leads a process group, with its children in it."""
    processes = json.loads((run_directory / "state.json").read_text())["processes"]
    return {name: process["pid"] for name, process in processes.items()}


def tree_cpu_s(pid: int) -> float:
    """Seconds of CPU time of a process and its children so far, those that left its group (PostgreSQL) included."""
    return sum(_cpu_s(child, fields) for child, fields in _all_processes() if pid in (child, int(fields[_PARENT])))


class Groups:
    """Processes with all their children.

    Args:
        leaders: by a name of one's choice, the id of a process that leads a process group.
    """

    def __init__(self, leaders: dict[str, int]) -> None:
        self._leaders = leaders

    def cpu_s(self) -> dict[str, float]:
        """Seconds of CPU time used so far, user and system, by name."""
        return {
            name: sum(_cpu_s(pid, fields) for pid, fields in processes) for name, processes in self._groups().items()
        }

    def pids(self) -> dict[str, list[int]]:
        """All processes of each group, by name."""
        return {name: [pid for pid, _ in processes] for name, processes in self._groups().items()}

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory by name; pages that several share are counted once, in parts."""
        return {
            name: sum(_proportional_bytes(pid) for pid, _ in processes) for name, processes in self._groups().items()
        }

    def pin(self, cores: set[int]) -> None:
        """Keeps them, with all threads that they have now, on `cores`."""
        for pid in [pid for processes in self._groups().values() for pid, _ in processes]:
            with contextlib.suppress(OSError):  # it may end while we look
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), cores)

    def _groups(self) -> dict[str, list[tuple[int, list[str]]]]:
        """By name, (pid, fields of its stat) of every process in the group."""
        names = {pid: name for name, pid in self._leaders.items()}
        groups: dict[str, list[tuple[int, list[str]]]] = {name: [] for name in self._leaders}
        for pid, fields in _all_processes():
            if name := names.get(int(fields[_GROUP])):
                groups[name].append((pid, fields))
        return groups


def _all_processes() -> Iterator[tuple[int, list[str]]]:
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):  # it may end while we look
                yield int(directory.name), (directory / "stat").read_text().rpartition(")")[2].split()


def _cpu_s(pid: int, fields: list[str]) -> float:
    """The process's own clock has nanoseconds; ticks of /proc are 10 ms, too coarse for what one answer costs."""
    ended_s = sum(int(ticks) for ticks in fields[_TICKS_OF_ENDED_CHILDREN]) / _TICKS_PER_S
    with contextlib.suppress(OSError):  # it may end while we look
        return ended_s + time.clock_gettime(_cpu_clock(pid))
    return ended_s


def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, as clock_getcpuclockid(3) gives it: CPUCLOCK_SCHED in the lowest bits."""
    return ~pid << 3 | 2


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
