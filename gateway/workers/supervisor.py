"""Starts the gateway's workers and restarts those that end."""

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from gateway.settings import GatewaySettings
from gateway.workers.worker import Worker, reserve
from services.common.engine.process import die_with_parent

_POLL_S = 0.1
_AGAIN_S = 1.0  # between two starts of one process
_DIRECTORY = "quartet-gateway-"
_MEMORY = Path("/dev/shm")

log = structlog.get_logger()


def supervise(settings: GatewaySettings, prepare: Callable[[GatewaySettings], None]) -> int:
    """Runs the workers until SIGTERM or SIGINT, and returns the exit status.

    A worker that ends before it listens ends all: each would.

    Args:
        prepare: makes what they share, by their settings, before they begin.

    Raises: what `prepare` raises.
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
    with port, _directory(Path(tempfile.gettempdir())) as directory, _directory(_memory()) as counts:
        shared = settings.workers, port.getsockname()[1], directory, counts, secrets.token_hex(16)
        workers = [Worker(number, *shared) for number in range(settings.workers)]
        prepare(workers[0].settings(settings))
        log.info("gateway starts its workers", workers=settings.workers, port=workers[0].port)
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


def _memory() -> Path:
    """Where nothing is that clients send: uploads and their words may fill the directory of temporary files."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


@contextlib.contextmanager
def _directory(parent: Path) -> Iterator[str]:
    """A directory that the workers share, locked. Removes those of killed gateways, which hold clients' words."""
    for left in parent.glob(f"{_DIRECTORY}*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_DIRECTORY, dir=parent) as directory, _locked(Path(directory)):
        yield directory


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Raises OSError: locked, or another user's."""
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def _processes(workers: list[Worker]) -> Iterator[dict[Worker, subprocess.Popen[bytes]]]:
    """On exit the workers finish their requests."""
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
