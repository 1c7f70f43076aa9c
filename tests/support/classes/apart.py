"""Work in processes of their own, with limits, which begin with all that this process has imported."""

import json
import multiprocessing
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_FORK = multiprocessing.get_context("fork")  # importing the libraries anew takes longer than most of the work

Work = Callable[[], dict[str, Any]]


def apart(
    works: Mapping[str, Work], logs: Path, at_once: int, timeout_s: float, memory_bytes: int
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yields each work's name and what it returns, which JSON can say, or why it returned nothing.

    Args:
        logs: folder; what the work `name` prints is in `name.log`.
        at_once: processes.
        timeout_s: after it, a process is killed.
        memory_bytes: address space that a process may take beyond this one's.
    """
    waiting = list(works.items())
    running: dict[str, tuple[BaseProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            name, work = waiting.pop(0)
            _answer(logs, name).unlink(missing_ok=True)
            process = _FORK.Process(target=_run, args=(work, logs, name, memory_bytes))
            process.start()
            running[name] = process, time.monotonic() + timeout_s
        first = min(end for _, end in running.values())
        wait([process.sentinel for process, _ in running.values()], max(0.0, first - time.monotonic()))
        for name, (process, end) in list(running.items()):
            late = process.is_alive() and time.monotonic() > end
            if process.is_alive() and not late:
                continue
            process.kill()
            process.join()
            del running[name]
            yield name, f"takes over {timeout_s:g} s here" if late else _read(logs, name, process.exitcode)


def _answer(logs: Path, name: str) -> Path:
    return logs / f"{name}.answer"


def _read(logs: Path, name: str, status: int | None) -> dict[str, Any] | str:
    file = _answer(logs, name)
    if not file.exists():
        return f"ends its process, status {status}"
    read = json.loads(file.read_text())
    file.unlink()
    return read


def _run(work: Work, logs: Path, name: str, memory_bytes: int) -> None:
    descriptor = os.open(logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        answer: dict[str, Any] | str = work()
    except BaseException as error:
        traceback.print_exc()
        answer = f"{type(error).__name__}: {error}"
    _answer(logs, name).write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries may hang
