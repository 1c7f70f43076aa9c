"""A whole system for a test: `quartet up` as users run it, and a look inside."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import IO

import httpx
import psutil

from benchmarks.systems.gateways import stage_addresses
from cli.plan import PIPELINE, Tls
from cli.scrape import Scrape
from cli.supervisor import free_ports
from gateway.access.api_keys import digest, new_key
from services.common.rpc.tls import Credentials
from services.common.telemetry.metrics import KEPT_S
from tests.support.network import certificates
from tests.support.stage.streaming import CHANNELS

START_TIMEOUT_S = 600  # a guard, as are the next two: a start takes a minute of two free cores
HANG_GUARD_S = 300
ANSWER_GUARD_S = 240  # of one answer
GATEWAY_KEPT_S = 1.0  # a page of metrics
IDENTITY = "all"  # of every process of a system, and of the tests that ask its stages
KV_BLOCK_TOKENS = 32  # vLLM's least on a CPU, so that short prompts have whole blocks to find in the prefix cache


class Access:
    """What opens a system that is closed to others: an API key, and a certificate of its CA.

    Attributes:
        certificates: their directory.
        key: that clients send.
    """

    def __init__(self, directory: Path) -> None:
        self.certificates = certificates.make(directory / "certificates", IDENTITY)
        self.key = new_key()
        self._keys_file = directory / "keys.yaml"
        entry = f'  - name: test\n    sha256: "{digest(self.key)}"\n    admin: true\n    max_realtime_sessions: 1000\n'
        self._keys_file.write_text(f"keys:\n{entry}")

    @property
    def flags(self) -> list[str]:
        """Of `quartet up`."""
        return [f"--api-keys-file={self._keys_file}", *self.stage_flags]

    @property
    def stage_flags(self) -> list[str]:
        """Of a stage."""
        return certificates.flags(self.certificates, IDENTITY)

    @property
    def tls(self) -> Tls:
        """Of an Omni."""
        home = self.certificates / IDENTITY
        return Tls(home / "tls.crt", home / "tls.key", home / "ca.crt")

    @property
    def credentials(self) -> Credentials:
        """As the files are now."""
        return certificates.credentials(self.certificates, IDENTITY)


class Stack:
    """A running system. `access`: None, if it is open to all. `output`: a file that `quartet up` writes to."""

    def __init__(
        self, process: subprocess.Popen, run_directory: Path, output: IO[bytes], access: Access | None = None
    ) -> None:
        self.process = process
        self.run_directory = run_directory
        self.access = access
        self._output = output
        self._read_s: dict[str, float] = {}

    @property
    def output(self) -> str:
        """What `quartet up` has said so far."""
        file = self._output.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    @property
    def state(self) -> dict:
        return json.loads((self.run_directory / "state.json").read_text())

    @property
    def url(self) -> str:
        return self.state["url"]

    @property
    def key(self) -> str:
        """The API key; any will do where none is asked for."""
        return self.access.key if self.access else "none"

    @cached_property
    def http(self) -> httpx.Client:
        """Asks the gateway, with the key. For any thread."""
        limits = httpx.Limits(max_keepalive_connections=0)  # a connection of its own for each, as of a new client
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=HANG_GUARD_S, limits=limits)

    @cached_property
    def model(self) -> str:
        """The name of the model by which clients ask for it."""
        return self.http.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    @contextlib.asynccontextmanager
    async def stages_reached(self) -> AsyncIterator[None]:
        """Channels that this process opens in the block are ones that the stages let in."""
        CHANNELS.credentials = self.access.credentials if self.access else None
        try:
            yield
        finally:
            await CHANNELS.close_all()
            CHANNELS.credentials = None

    @property
    def addresses(self) -> dict[str, str]:
        """gRPC address of each stage."""
        return stage_addresses(self.run_directory)

    def pid(self, name: str) -> int:
        return self.state["processes"][name]["pid"]

    @property
    def omni_arguments(self) -> str:
        """Python's, of an Omni of these stages."""
        reach = f"address={str(self.run_directory)!r}"
        if self.access is None:
            return reach
        files = list(map(str, self.access.tls.files))
        return f'{reach}, tls=__import__("quartet").Tls(*map(__import__("pathlib").Path, {files}))'

    def ready(self) -> bool:
        return get(f"{self.url}/ready").status_code == 200

    def held_up(self) -> contextlib.AbstractContextManager[None]:
        """In the block, what dies stays down: `quartet up` stands still."""
        return stopped(self.process.pid)

    def in_flight(self) -> dict[str, int]:
        """Requests that each stage runs or queues, from its metrics."""
        return {stage: int(self.metric(stage, "quartet_requests_in_flight")) for stage in self.addresses}

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """Sum of the series of `metric` that have `labels`, of process `name`."""
        return self.page(name).total(metric, **labels) or 0.0

    def page(self, name: str) -> Scrape:
        """The metrics of process `name`, as they are now: none that it has kept."""
        kept_s = GATEWAY_KEPT_S if name == "gateway" else KEPT_S
        time.sleep(max(0.0, self._read_s.get(name, 0.0) + kept_s - time.monotonic()))
        address = self.state["processes"][name]["metrics_address"]
        page = Scrape.parse(get(f"http://{address}/metrics").text)
        self._read_s[name] = time.monotonic()
        return page

    def cancelled(self, name: str) -> int:
        """Requests that stage `name` has given up because nobody wanted them any more."""
        return int(self.metric(name, "quartet_requests_total", outcome="CANCELLED"))

    def sent_bytes(self, name: str) -> dict[str, float]:
        """Payload that stage `name` has sent to others, by transport."""
        page, transports = self.page(name), ("inline", "shared_memory", "ucx")
        return {by: page.total("quartet_stream_bytes_total", transport=by) or 0.0 for by in transports}

    def log(self, name: str) -> str:
        return (self.run_directory / f"{name}.log").read_text()


def get(url: str) -> httpx.Response:
    """Without TLS: certificates, which take 20 ms to read, are none of it."""
    return httpx.get(url, timeout=ANSWER_GUARD_S, verify=False)


def brief_pipeline(directory: Path, pipeline: Path = PIPELINE) -> Path:
    """A pipeline, by default Qwen3-Omni's, for a random checkpoint, whose speech would else go on to the most frames
    that it may have: a request that sets no most gets one of 8 s."""
    text = pipeline.read_text()
    before, talker, after = text.partition("  talker:")
    file = directory / "brief.yaml"
    file.write_text(before + talker + after.replace("sampling: {}", "sampling: {max_frames: 100}", 1))
    return file


def until(condition: Callable[[], object], what: str = "", within_s: float = HANG_GUARD_S) -> None:
    """Returns when `condition()` is true. The deadline is a guard against hanging, not a claim about speed."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)


def free_port() -> int:
    """One that stays free until it is used."""
    return free_ports(1)[0]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process stands still in the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def running(checkpoint: Path | None, run_directory: Path, *flags: str, access: Access | None = None) -> Iterator[Stack]:
    """Runs `quartet up` around a block, and checks that it leaves nothing behind. Without a `checkpoint` it serves the
    models that come with Quartet, as README.md starts them."""
    command = [sys.executable, "-m", "cli.main", "up", "--port", str(free_port())]
    command += ["--model", str(checkpoint)] if checkpoint else []
    config = checkpoint / "config.json" if checkpoint else None
    if config and config.exists() and "thinker_config" in json.loads(config.read_text()):  # else there is no thinker
        command.append(f"--thinker-arg=--block-size={KV_BLOCK_TOKENS}")
    # A stage that stands still for seconds on a busy machine is not down; one that died refuses connections at once.
    command.append(f"--gateway-arg=--health-timeout-s={HANG_GUARD_S}")
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, "--run-dir", str(run_directory), *(access.flags if access else ()), *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        stack = Stack(process, run_directory, output, access)
        of_run: set[str] = set()
        try:
            wait_until_ready(stack)
            of_run = set(shared_memory_of(run_directory))
            yield stack
            of_run |= set(shared_memory_of(run_directory))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(HANG_GUARD_S)
        assert process.returncode == 0, stack.output
        assert not list(processes_of(run_directory)), stack.output
        assert not [file for file in of_run if Path(file).exists()]


def wait_until_ready(stack: Stack) -> None:
    """Returns when the gateway is ready and `quartet up` has seen that: to it a death before is a failed start."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        assert stack.process.poll() is None, stack.output
        with contextlib.suppress(OSError, httpx.HTTPError):
            if stack.ready() and "ready after" in stack.output:
                return
        time.sleep(0.2)
    raise AssertionError(f"not ready within {START_TIMEOUT_S} s")


def processes_of(run_directory: Path) -> Iterator[int]:
    """Processes that write to the logs of a run, children of stages included."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            for fd in (1, 2):
                if os.readlink(f"/proc/{process.pid}/fd/{fd}").startswith(str(run_directory)):
                    yield process.pid
                    break


def shared_memory_of(run_directory: Path) -> Iterator[str]:
    """Files in /dev/shm that processes of a run have mapped or open."""
    for pid in processes_of(run_directory):
        with contextlib.suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()  # psutil reads smaps, which takes longer
            mapped = [line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line]
            opened = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
            yield from (file for file in (*mapped, *opened) if file.startswith("/dev/shm/") and "(deleted)" not in file)
