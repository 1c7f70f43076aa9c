"""A child process of `quartet up`, with its own process group and log file."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from cli.reaper import Reaper, sweep_shared_memory, waits_for
from services.common.engine.process import die_with_parent

TAIL_BYTES = 64 * 1024
VMSTAT = Path("/proc/vmstat")
OUT_OF_MEMORY = "out of memory"


class ChildProcess:
    """Descendants of the process are in its group and end with it."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log_file: Path, reaper: Reaper
    ) -> None:
        self.name, self.log_file = name, log_file
        self._command, self._environment, self._reaper = command, {**os.environ, **environment}, reaper
        self._process: asyncio.subprocess.Process | None = None
        self._group_is_left = False

    @property
    def pid(self) -> int:
        """Also of the group; 0 before the first start."""
        return self._process.pid if self._process else 0

    @property
    def exit_status(self) -> int | None:
        """Negative: the signal. None while it runs."""
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        """Output is appended to the log file."""
        with self.log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                # A group, to be ended as one, but not a session: Linux shares the cores evenly between sessions
                # (autogroup), and an event loop would wait up to half a second behind its own process's engine.
                process_group=0,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self._reaper.watch(self.pid)
        self._group_is_left = True

    async def wait(self) -> int:
        """Ends the rest of the group, too. Returns the status."""
        assert self._process
        status = await self._process.wait()
        await self._end_group()
        return status

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, and after `grace_s` seconds SIGKILL."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                self._process.kill()
        await self.wait()

    def log_tail(self) -> str:
        with self.log_file.open("rb") as log:  # which may be as long as the system has run
            log.seek(-min(TAIL_BYTES, self.log_file.stat().st_size), os.SEEK_END)
            return log.read().decode(errors="replace")

    async def _end_group(self) -> None:
        """Once: the group's id may be reused."""
        if self._group_is_left:
            self._group_is_left = False
            for pause_s in waits_for(self.pid):  # not in a thread: at the interpreter's exit none can be had
                await asyncio.sleep(pause_s)
            self._reaper.forget(self.pid)
            sweep_shared_memory()


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory; 0 if unknown."""
    try:
        counters = dict(line.split() for line in VMSTAT.read_text().splitlines())
    except OSError:
        return 0
    return int(counters.get("oom_kill", 0))


def ending(status: int, killed: int = 0) -> str:
    """Describes an exit status; `killed`: `oom_kills` meanwhile."""
    said = f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
    return f"{said}; {OUT_OF_MEMORY}: the kernel has killed {killed} meanwhile (dmesg)" if killed else said
