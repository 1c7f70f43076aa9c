"""A whole system over two hosts: gateway and thinker on one, talker and code2wav on the other."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil

from cli.plan import PIPELINE
from cli.reaper import Reaper, end_group
from cli.scrape import Scrape
from tests.support.network.hosts import Host, TwoHosts
from tests.support.systems.stack import KV_BLOCK_TOKENS, START_TIMEOUT_S

STAGES = ("thinker", "talker", "code2wav")
_PORTS = {"gateway": 8000, "thinker": 50051, "talker": 50052, "code2wav": 50053}
_METRICS_PORTS = {stage: port + 10_000 for stage, port in _PORTS.items()}
STOP_TIMEOUT_S = 20


class TwoHostsStack:
    """The processes of a system over `hosts`, each with a log in `directory`."""

    def __init__(self, hosts: TwoHosts, directory: Path) -> None:
        self.hosts = hosts
        self.url = self._url("gateway", _PORTS)
        self._directory = directory
        self._processes: dict[str, subprocess.Popen] = {}
        self._reaper = Reaper()

    def start(self, checkpoint: Path, flags: Sequence[str] = ()) -> None:
        """Starts all of it and returns when the gateway is ready. `flags` go to each of the stages."""
        where = ["--model", str(checkpoint), "--host", "0.0.0.0"]
        for stage in STAGES:
            ports = ["--port", str(_PORTS[stage]), "--metrics-port", str(_METRICS_PORTS[stage])]
            own = ["--block-size", str(KV_BLOCK_TOKENS)] if stage == "thinker" else []
            self._start(stage, f"services.{stage}", *where, *ports, *own, *flags)
        self.start_gateway()

    def start_gateway(self) -> None:
        """Starts the gateway, anew if there is one, and returns when it is ready."""
        self._stop("gateway")
        addresses = [f"--stage={stage}={self.address(stage)}" for stage in STAGES]
        listen = ["--host", "0.0.0.0", "--allow-anonymous=true", "--port", str(_PORTS["gateway"])]
        self._start("gateway", "gateway", "--pipeline", str(PIPELINE), *listen, *addresses)
        end = time.monotonic() + START_TIMEOUT_S
        while not self.ready():
            for name, process in self._processes.items():
                assert process.poll() is None, self.log(name)
            assert time.monotonic() < end, f"not ready within {START_TIMEOUT_S} s"
            time.sleep(0.1)

    def stop(self) -> None:
        """Stops the gateway, then the stages, all at once."""
        self._stop("gateway")
        self._stop(*STAGES)
        self._reaper.close()

    def ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        return False

    def address(self, stage: str) -> str:
        """By which the hosts reach a stage."""
        return f"{self._host(stage).address}:{_PORTS[stage]}"

    def round_trip_s(self) -> float:
        """How long it takes to connect to one host from the other."""
        code = (
            "import socket, sys, time; begun = time.monotonic(); "
            "socket.create_connection((sys.argv[1], sys.argv[2]), 60); print(time.monotonic() - begun)"
        )
        host, _, port = self.address("talker").rpartition(":")
        connect = self.hosts.a.command(sys.executable, "-c", code, host, port)
        return float(subprocess.run(connect, check=True, capture_output=True, text=True).stdout)

    def totals(self, metric: str, **labels: str) -> dict[str, float]:
        """Each stage's sum of a metric's series that have `labels`."""
        pages = {stage: httpx.get(f"{self._url(stage, _METRICS_PORTS)}/metrics", timeout=60).text for stage in STAGES}
        return {stage: Scrape.parse(page).total(metric, **labels) or 0.0 for stage, page in pages.items()}

    def descriptors(self) -> dict[str, int]:
        """Open files and sockets of each process."""
        return {name: psutil.Process(process.pid).num_fds() for name, process in self._processes.items()}

    def more_descriptors(self, before: dict[str, int]) -> int:
        """How many more the process has that has most more of them than `before`."""
        return max(count - before[name] for name, count in self.descriptors().items())

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()

    def _host(self, name: str) -> Host:
        return self.hosts.a if name in ("gateway", "thinker") else self.hosts.b

    def _url(self, name: str, ports: dict[str, int]) -> str:
        return f"http://{self._host(name).reached_at}:{ports[name]}"

    def _start(self, name: str, module: str, *flags: str) -> None:
        command = self._host(name).command(sys.executable, "-m", module, *flags)
        with (self._directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0, env=os.environ
            )
        self._processes[name] = process
        self._reaper.watch(process.pid)

    def _stop(self, *names: str) -> None:
        ending = [self._processes.pop(name) for name in names if name in self._processes]
        for process in ending:
            process.terminate()
        for process in ending:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            end_group(process.pid)
            self._reaper.forget(process.pid)


@contextlib.contextmanager
def running(hosts: TwoHosts, checkpoint: Path, directory: Path, flags: Sequence[str] = ()) -> Iterator[TwoHostsStack]:
    """A system around a block."""
    system = TwoHostsStack(hosts, directory)
    try:
        system.start(checkpoint, flags)
        yield system
    finally:
        system.stop()
