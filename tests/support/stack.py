"""A whole system for a test: `quartet up` as users run it, and a look inside."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from cli.scrape import Scrape

START_TIMEOUT_S = 180
KV_BLOCK_TOKENS = 32  # vLLM's least on a CPU, so that short prompts have whole blocks to find in the prefix cache


class Stack:
    """A running system."""

    def __init__(self, process: subprocess.Popen, run_directory: Path) -> None:
        self.process = process
        self.run_directory = run_directory

    @property
    def state(self) -> dict:
        return json.loads((self.run_directory / "state.json").read_text())

    @property
    def url(self) -> str:
        return self.state["url"]

    @property
    def addresses(self) -> dict[str, str]:
        """gRPC address of each stage."""
        processes = self.state["processes"]
        return {name: process["address"] for name, process in processes.items() if name != "gateway"}

    def pid(self, name: str) -> int:
        return self.state["processes"][name]["pid"]

    def ready(self) -> bool:
        return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200

    def in_flight(self) -> dict[str, int]:
        """Requests that each stage runs or queues, from its metrics."""
        return {stage: int(self.metric(stage, "quartet_requests_in_flight")) for stage in self.addresses}

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """Sum of the series of `metric` that have `labels`, of process `name`."""
        address = self.state["processes"][name]["metrics_address"]
        page = Scrape.parse(httpx.get(f"http://{address}/metrics", timeout=5).text)
        return page.total(metric, **labels) or 0.0

    def sent_bytes(self, name: str) -> dict[str, float]:
        """Payload that stage `name` has sent to others, by transport."""
        transports = ("inline", "shared_memory", "ucx")
        return {by: self.metric(name, "quartet_stream_bytes_total", transport=by) for by in transports}

    def log(self, name: str) -> str:
        return (self.run_directory / f"{name}.log").read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(checkpoint: Path, run_directory: Path, *flags: str) -> Iterator[Stack]:
    """Runs `quartet up` around a block, and checks that it leaves nothing behind."""
    shared_memory, of_run = set(os.listdir("/dev/shm")), set()
    command = [sys.executable, "-m", "cli.main", "up", "--model", str(checkpoint), "--port", str(free_port())]
    config = checkpoint / "config.json"
    if config.exists() and "thinker_config" in json.loads(config.read_text()):  # else there is no thinker
        command.append(f"--thinker-arg=--block-size={KV_BLOCK_TOKENS}")
    process = subprocess.Popen(
        [*command, "--run-dir", str(run_directory), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stack = Stack(process, run_directory)
    try:
        wait_until_ready(stack)
        of_run = set(os.listdir("/dev/shm")) - shared_memory  # later ones may be this process's own
        yield stack
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert not list(processes_of(run_directory)), output
    assert not of_run & set(os.listdir("/dev/shm"))


def wait_until_ready(stack: Stack) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        assert stack.process.poll() is None, stack.process.stdout.read()
        with contextlib.suppress(OSError, httpx.HTTPError):
            if stack.ready():
                return
        time.sleep(0.2)
    raise AssertionError(f"not ready within {START_TIMEOUT_S} s")


def processes_of(run_directory: Path) -> Iterator[int]:
    """Processes that write to the logs of a run, children of stages included."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            for fd in (1, 2):
                if os.readlink(f"/proc/{process.pid}/fd/{fd}").startswith(str(run_directory)):
                    yield process.pid
                    break
