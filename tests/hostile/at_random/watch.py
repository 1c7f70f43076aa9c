"""What the processes do meanwhile: whether they live, what memory they have, how long the gateway's loop is held."""

import contextlib
import re
import resource
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.systems.processes import Groups, system_pids

EVERY_S = 0.5
_FAULT = re.compile(r'Traceback|"level": "(error|critical)"|MemoryError|bad_alloc')


def limit(run_directory: Path, most_bytes: dict[str, int]) -> None:
    """Sets RLIMIT_DATA of processes, by name, and of all below them that run now; what they start inherits it."""
    for name, pids in Groups(system_pids(run_directory)).pids().items():
        for pid in pids if name in most_bytes else ():
            resource.prlimit(pid, resource.RLIMIT_DATA, (most_bytes[name], most_bytes[name]))


def faults(run_directory: Path) -> dict[str, int]:
    """How many lines of errors each process has logged."""
    logs = {log.stem: log.read_text(errors="replace").splitlines() for log in run_directory.glob("*.log")}
    return {name: sum(bool(_FAULT.search(line)) for line in lines) for name, lines in logs.items()}


@dataclass
class Watch:
    """Watches in threads, from `start` to `stop`.

    Attributes:
        ended: processes that are others than before, with the time.
        peaks: bytes of a process and all below it that no file has, at most.
        waited_s: the longest that /health took.
        held_s: the most CPU time that the gateway's event loop had meanwhile: it was not held longer.
    """

    url: str
    run_directory: Path
    ended: list[str] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    waited_s: float = 0.0
    held_s: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._look, self._ask)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _look(self) -> None:
        first = system_pids(self.run_directory)
        while not self._stop.wait(EVERY_S):
            pids = system_pids(self.run_directory)
            for name, pid in first.items():
                if pids.get(name) != pid or not Path(f"/proc/{pid}").exists():
                    self.ended.append(f"{name} ({pid}) at {time.strftime('%X')}")
            first = pids
            for name, group in Groups(pids).pids().items():
                self.peaks[name] = max(self.peaks.get(name, 0), sum(map(_bytes, group)))

    def _ask(self) -> None:
        pid = system_pids(self.run_directory)["gateway"]
        with httpx.Client(timeout=120) as client:
            while not self._stop.wait(EVERY_S / 5):
                cpu_s, began = _cpu_s(pid), time.monotonic()
                with contextlib.suppress(httpx.HTTPError):
                    client.get(f"{self.url}/health")
                self.waited_s = max(self.waited_s, time.monotonic() - began)
                self.held_s = max(self.held_s, _cpu_s(pid) - cpu_s)


def _cpu_s(pid: int) -> float:
    """Of the process's first thread."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
    return 0.0


def _bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        found = re.findall(r"Rss(?:Anon|Shmem):\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return sum(map(int, found)) * 1024
    return 0
