"""Starts a gateway's processes, starts those anew that end by themselves, and ends with them."""

import contextlib
import fcntl
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from gateway.http.workers.worker import Worker, reserve
from gateway.settings import GatewaySettings
from services.common.engine.process import die_with_parent

_POLL_S = 0.1
_AGAIN_S = 1.0  # between two starts of one process
_DIRECTORY = "quartet-gateway-"

log = structlog.get_logger()


def supervise(settings: GatewaySettings) -> int:
    """Runs the processes until SIGTERM or SIGINT, which they get as well; returns the exit status.

    A process that ends before it has listened ends all: what is wrong with the settings is so for each of them.
    """
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        port = reserve(settings.host, settings.port)
    except OSError as error:
        sys.exit(f"--host {settings.host} --port {settings.port}: {error.strerror}")
    with port, _directory() as directory:
        at = port.getsockname()[1]
        workers = [Worker(number, settings.workers, at, directory) for number in range(settings.workers)]
        log.info("gateway starts its workers", workers=settings.workers, port=at)
        with _processes(workers) as processes:
            while not stopping:
                time.sleep(_POLL_S)
                for worker in workers:
                    status = processes[worker].poll()
                    if status is None or stopping:
                        continue
                    if not worker.socket_of(worker.number).exists():
                        return status or 1
                    log.error("gateway worker ended", worker=worker.number, status=status)
                    worker.socket_of(worker.number).unlink(missing_ok=True)
                    time.sleep(_AGAIN_S)
                    processes[worker] = _start(worker)
    return 0


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    """What the processes share, around a block. Those of gateways that were killed are removed: they have what clients
    said. A gateway holds a lock in its own as long as it lives, however it ends."""
    for left in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY}*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_DIRECTORY) as directory, _locked(Path(directory)):
        yield directory


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Raises OSError: somebody else holds it, or it is another user's."""
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def _processes(workers: list[Worker]) -> Iterator[dict[Worker, subprocess.Popen[bytes]]]:
    """The running processes; at the end they finish what they have begun."""
    processes = {worker: _start(worker) for worker in workers}
    try:
        yield processes
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait()


def _start(worker: Worker) -> subprocess.Popen[bytes]:
    command = [sys.executable, *sys.orig_argv[1:]]  # with Python's own flags, such as -P
    return subprocess.Popen(command, env=worker.environment, preexec_fn=die_with_parent)
