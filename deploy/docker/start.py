#!/opt/quartet/bin/python -IS
"""What a container does under docker compose: `start.py COMMAND...` runs the command and counts its failed starts.

Docker starts again what has ended, for ever, and calls it starting each time: `docker compose up --wait` would wait as
long. So a process that ends before it has served is run again here. When that was the third time, the log's last line
says why, the health command finds FAILED and says so too, and `up --wait` ends: compose waits for the other containers
even then, so they are let know by a file in SHARED, and their health commands end their first wait. After a pause the
container ends as well: Docker starts it anew, so that what was amiss for a while, a model hub out of reach, is got
over. A process that has served ends its container at once, and a stop is passed on to it.

Standard library alone, as it runs in every image.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, NoReturn

# Files that this and the health command (deploy/docker/healthy) share.
SERVED = Path("/tmp/quartet-served")
FAILED = Path("/tmp/quartet-failed")
SHARED = Path("/run/quartet-starts")  # with the other containers: of each that cannot start the moment and the cause

TRIES = 3
BETWEEN_TRIES_S = 1.0
PAUSE_S = 120.0  # long enough for whoever waits to see it
LAST_BYTES = 65536  # of what the process says, where its last error is looked for
CGROUP = Path("/sys/fs/cgroup")


class Process:
    """The command as a child of this process, which prints its output."""

    def __init__(self, command: list[str]) -> None:
        self._said = {1: bytearray(), 2: bytearray()}  # the last of what it said by standard output and error
        self._killed_before = _memory_kills()
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True)
        outputs = ((self._child.stdout, 1), (self._child.stderr, 2))
        self._pumps = [threading.Thread(target=self._pump, args=each, daemon=True) for each in outputs]
        for pump in self._pumps:
            pump.start()

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGTERM)

    def wait(self) -> int:
        """Returns its exit status, as a shell has it, and kills what it leaves running, orphans included."""
        while True:
            pid, status = os.wait()
            if pid == self._child.pid:
                break
        self._child.returncode = code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        for pump in self._pumps:
            pump.join(5)
        return code if code >= 0 else 128 - code

    def why(self, status: int) -> str:
        """Describes in a sentence how it ended."""
        if _memory_kills() > self._killed_before:
            return f"killed for want of memory: the container's limit is {_memory_limit_mib()} MiB"
        said = b"\n".join(map(bytes, self._said.values()))
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        if cause := _critical(lines):
            return cause
        if status > 128:
            return f"ended by {_signal_name(status - 128)}"
        return _last_error(lines) if lines else f"ended with status {status}, without a word"

    def _pump(self, source: IO[bytes], to: int) -> None:
        while piece := os.read(source.fileno(), LAST_BYTES):
            self._said[to] += piece
            del self._said[to][:-LAST_BYTES]
            while piece:
                piece = piece[os.write(to, piece) :]


def _critical(lines: list[str]) -> str | None:
    """Message of a log's last critical line, or None."""
    for line in reversed(lines):
        if (entry := _entry(line)).get("level") == "critical":
            exception = str(entry.get("exception", "")).strip().rpartition("\n")[2]
            return str(entry.get("error") or exception or entry.get("event"))
    return None


def _last_error(lines: list[str]) -> str:
    """The last line of the last traceback, else the last line."""
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    last = (errors or lines)[-1]
    return str(_entry(last).get("event", last)).strip()


def _entry(line: str) -> dict[str, object]:
    """Parses a line of log; empty if it is not JSON."""
    try:
        return json.loads(line) if line.startswith("{") else {}
    except ValueError:
        return {}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _memory_kills() -> int:
    """Counts this container's processes that the kernel killed for want of memory; 0 if unknown."""
    for file in (CGROUP / "memory.events", CGROUP / "memory/memory.oom_control"):
        if file.exists() and (found := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)):
            return int(found[1])
    return 0


def _memory_limit_mib() -> str:
    for file in (CGROUP / "memory.max", CGROUP / "memory/memory.limit_in_bytes"):
        if file.exists() and (limit := file.read_text().strip()).isdecimal():
            return str(int(limit) >> 20)
    return "?"


def _say(level: str, event: str, **facts: object) -> None:
    """Prints a line of log, as the other processes write them."""
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    print(json.dumps({**facts, "event": event, "level": level, "timestamp": moment}), file=sys.stderr, flush=True)


def main(command: list[str]) -> NoReturn:
    """Runs `command` until it has served, or has failed to start too often."""
    process: Process | None = None
    stopped = waiting = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        if process is not None:
            process.terminate()
        elif waiting:
            sys.exit(0)

    name = command[-1].rpartition(".")[2]
    for file in (SERVED, FAILED):
        file.unlink(missing_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    for failures in range(1, TRIES + 1):
        waiting = False
        process = Process(command)
        if stopped:
            process.terminate()
        status = process.wait()
        if stopped or status == 0 or SERVED.exists():
            sys.exit(status)
        why = process.why(status)
        process, waiting = None, True
        if why.startswith("killed for want of memory"):
            why += f" ({name.upper()}_MEMORY)"
        if failures < TRIES:
            _say("error", "failed to start; trying again", stage=name, failures=failures, error=why)
            time.sleep(BETWEEN_TRIES_S)
    FAILED.write_text(f"failed to start {TRIES} times: {why}\n")
    _say("critical", f"failed to start {TRIES} times; the next try is in {PAUSE_S:.0f} s", stage=name, error=why)
    _pause(name)
    sys.exit(status)


def _pause(name: str) -> None:
    """Waits, and informs the other containers by a file, whose age shows whether it is of a container that is gone."""
    file = SHARED / f"{name}-{os.uname().nodename}"
    end = time.monotonic() + PAUSE_S
    try:
        while time.monotonic() < end:
            if SHARED.is_dir():
                file.write_text(f"{time.time():.0f} {name} cannot start\n")
            time.sleep(1)
    finally:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
