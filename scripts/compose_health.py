"""Measures the cost of health checks, with Docker's own processes, for scripts/test_compose.py or by itself:

python scripts/compose_health.py      of all that Docker runs on this machine now, for a minute
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from compose_system import STAGES, System, docker

SECONDS = 60
MOST_CHECKS = 2  # that Docker starts in them, of one container


def health_checks(system: System) -> Iterator[str]:
    """Checks that health commands stay: Docker starts one of each container a minute."""
    cost = measure()
    for service in ("gateway", *STAGES):
        (container,) = system.containers(service)
        at = ("--filter", f"container={container['Id']}", "--filter", "event=exec_start")
        checks = docker("events", "--since", f"{SECONDS}s", "--until", "0s", *at).splitlines()
        assert 0 < len(checks) <= MOST_CHECKS, f"{service}: {len(checks)} checks in {SECONDS} s"
    yield cost


def measure() -> str:
    """Returns processor time of dockerd, containerd, the shims and their children in a minute."""
    before = _times()
    time.sleep(SECONDS)
    ticks = sum(now - before.get(process, 0) for process, now in _times().items())
    used = ticks / os.sysconf("SC_CLK_TCK")
    return f"Docker's processes: {used:.2f} s of a core in {SECONDS} s, {used / SECONDS:.1%}"


def _times() -> dict[str, int]:
    """Ticks of each of Docker's processes and of its ended children."""
    found: dict[str, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().startswith(("dockerd", "containerd")):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                found[process.name] = sum(map(int, fields[11:15]))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


if __name__ == "__main__":
    print(measure())
