"""What an attack costs the gateway, which runs in this process: the same on a machine that is busy."""

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MIB = 1024 * 1024
MAX_HELD_S = 0.25  # of the event loop's own CPU time, by one callback
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Cost:
    """`held_s`: the longest callback's CPU time. `by`: what that was. `rise_mib`: of the largest resident size."""

    held_s: float = 0.0
    by: str = ""
    rise_mib: float = 0.0
    cpu_s: float = 0.0


@contextmanager
def metered() -> Iterator[Cost]:
    """Fills in the costs of what runs within."""
    cost, run = Cost(), asyncio.Handle._run

    def timed(handle: Any) -> None:
        callback, began = handle._callback, time.thread_time()
        try:
            run(handle)
        finally:
            if (held_s := time.thread_time() - began) > cost.held_s:
                cost.held_s, cost.by = held_s, repr(callback)[:600]

    before, began = _mib("VmRSS"), time.process_time()
    _RESET.write_text("5")  # the largest size so far is forgotten
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        yield cost
    cost.rise_mib, cost.cpu_s = _mib("VmHWM") - before, time.process_time() - began


def _mib(name: str) -> float:
    match = re.search(rf"{name}:\s*(\d+) kB", _STATUS.read_text())
    assert match
    return int(match[1]) / 1024
