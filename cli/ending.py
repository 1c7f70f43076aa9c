"""Why a process ended, in words."""

import signal
from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def oom_kills() -> int:
    """How many processes this machine's kernel has killed for want of memory since it started; 0 where none counts."""
    try:
        counters = dict(line.split() for line in VMSTAT.read_text().splitlines())
    except OSError:
        return 0
    return int(counters.get("oom_kill", 0))


def describe(status: int, killed: int = 0) -> str:
    """What to say of a process that has ended.

    Args:
        status: its exit status; negative: the signal that killed it.
        killed: how many processes the kernel has killed meanwhile for want of memory. One of them may be a stage's own
            child: the stage then ends with an error.
    """
    said = f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
    return f"{said}; out of memory: the kernel has killed {killed} meanwhile (dmesg)" if killed else said
