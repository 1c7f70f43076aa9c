"""The two sides of dit.py, each in a process of its own: the dit stage over gRPC, and diffusers."""

import asyncio
import contextlib
import multiprocessing
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.diffusion import peer
from benchmarks.diffusion.work import Turn, Wish, as_integers, job
from benchmarks.systems.processes import Groups
from cli.reaper import Reaper
from cli.supervisor import free_ports
from gateway.pipeline.dit import Pieces
from gateway.pipeline.kinds import KINDS
from quartet.v1 import dit_pb2, dit_pb2_grpc, server_info_pb2, server_info_pb2_grpc
from services.common.rpc import channels

START_TIMEOUT_S = 1800.0
STOP_GRACE_S = 15.0
LOG_TAIL_CHARACTERS = 4000
PROGRESS_INTERVAL_MS = 100  # of a load's requests, as the gateway asks for


@dataclass
class Received:
    """What came of one request, and when (`time.perf_counter`)."""

    sent_s: float
    steps_s: dict[int, float] = field(default_factory=dict)  # by number, from 1; those that were reported
    done_s: float = 0.0
    pieces: list[dit_pb2.DitPiece] = field(default_factory=list, repr=False)
    summary: dit_pb2.DitSummary | None = None

    @property
    def step_s(self) -> float:
        """Of one denoising step; 0 where there is one."""
        first, last = min(self.steps_s), max(self.steps_s)
        return (self.steps_s[last] - self.steps_s[first]) / (last - first) if last > first else 0.0

    def output(self) -> Any:
        """The array: 8 bit pixels or PCM16; of a video with sound its frames."""
        pieces = Pieces()
        for piece in [piece for piece in self.pieces if not piece.sample_rate_hz] or self.pieces:
            pieces.add(piece)
        return as_integers(pieces.array())


async def receive(
    stub: dit_pb2_grpc.DitServiceStub,
    wish: Wish,
    on_step: Callable[[int], object] = lambda step: None,
    progress_interval_ms: int = 0,
) -> Received:
    """Runs one request to its end; `on_step` gets the number of each reported step, from 1.

    Raises:
        grpc.aio.AioRpcError: it was refused or failed.
    """

    async def requests() -> Any:
        start = wish.start(uuid.uuid4().hex)
        start.progress_interval_ms = progress_interval_ms
        yield dit_pb2.DitServiceGenerateRequest(start=start)

    received = Received(time.perf_counter())
    call: Any = stub.Generate(requests())
    async for response in call:
        match response.WhichOneof("message"):
            case "progress":
                received.steps_s[response.progress.step] = time.perf_counter()
                on_step(response.progress.step)
            case "piece":
                received.pieces.append(response.piece)
                received.done_s = time.perf_counter()
            case "summary":
                received.summary = response.summary
    return received


class Quartet:
    """A dit stage's process.

    Attributes:
        info: what it says of itself; after `wait_until_ready`.
    """

    def __init__(self, name: str, model: Path, flags: Sequence[str], scratch: Path) -> None:
        port = free_ports(1)[0]
        self.name, self._address = name, f"127.0.0.1:{port}"
        self.info = server_info_pb2.GetServerInfoResponse()
        self._log_file = scratch / f"dit-{port}.log"
        command = [sys.executable, "-m", "services.dit", "--model", str(model), "--port", str(port), *flags]
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
        self._reaper = Reaper()  # a benchmark that is killed leaves no stage behind
        self._reaper.watch(self._process.pid)
        self._groups = Groups({name: self._process.pid})

    def wait_until_ready(self) -> None:
        """Blocks until it serves; ends the program, with the end of its log, if it does not."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with grpc.insecure_channel(self._address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
            while True:
                try:
                    answer = check(health_pb2.HealthCheckRequest(service=KINDS["dit"].service), timeout=2)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        break
                except grpc.RpcError:
                    pass
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    sys.exit(f"the dit stage '{self.name}' does not serve:\n{self._log_tail()}")
                time.sleep(0.1)
            stub: Any = server_info_pb2_grpc.ServerInfoServiceStub(channel)
            self.info = stub.GetServerInfo(server_info_pb2.GetServerInfoRequest())

    def run(self, asked: Sequence[Wish], at_once: bool) -> Turn:
        """Sends the requests one after another, or all at once. Ends the program if one fails."""

        async def load(stub: dit_pb2_grpc.DitServiceStub) -> list[Received]:
            def send(wish: Wish) -> Coroutine[Any, Any, Received]:
                return receive(stub, wish, progress_interval_ms=PROGRESS_INTERVAL_MS)

            if at_once:
                return list(await asyncio.gather(*map(send, asked)))
            return [await send(wish) for wish in asked]

        before_s = self._cpu_s()
        came: list[Received] = self.call(load)
        cpu_s = (self._cpu_s() - before_s) / len(came)
        began_s = came[0].sent_s
        return Turn(
            max(each.done_s for each in came) - began_s,
            min(each.done_s for each in came) - began_s,
            median(each.step_s for each in came) * 1000,
            cpu_s,
            fmean(each.summary.mean_batch if each.summary else 0.0 for each in came),
            [each.output() for each in came],
        )

    def call(self, use: Callable[[dit_pb2_grpc.DitServiceStub], Any]) -> Any:
        """What the coroutine `use(stub)` returns, run on a channel that is connected before it begins."""

        async def connected() -> Any:
            async with grpc.aio.insecure_channel(self._address, options=channels.OPTIONS) as channel:
                await channel.channel_ready()
                return await use(dit_pb2_grpc.DitServiceStub(channel))

        try:
            return asyncio.run(connected())
        except grpc.aio.AioRpcError as error:
            sys.exit(f"{self.name}: {error.code().name}: {error.details()}\n{self._log_tail()}")

    def _cpu_s(self) -> float:
        return sum(self._groups.cpu_s().values())

    def _log_tail(self) -> str:
        return self._log_file.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]

    def close(self) -> None:
        """Ends it, and what is left of its group."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_GRACE_S)
        self._reaper.close()
        self._process.wait()


class Diffusers:
    """diffusers' process, with the dtype and device that the stage `like` has."""

    def __init__(self, model: Path, like: server_info_pb2.GetServerInfoResponse, scratch: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipeline = like.dit.pipeline
        self._log_file = scratch / f"diffusers-{uuid.uuid4().hex[:8]}.log"
        self._pipe, theirs = context.Pipe()
        arguments = (str(model), self._pipeline, like.dtype, like.device, self._log_file, theirs)
        self._process = context.Process(target=peer.serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid
        self._groups = Groups({"diffusers": self._process.pid})

    def wait_until_ready(self) -> None:
        """Blocks until it has loaded. Here and in `run`, the program ends with the end of its log if it ended."""
        self._receive()

    def run(self, asked: Sequence[Wish], together: bool) -> Turn:
        """Runs the requests one after another, or in one call."""
        before_s = sum(self._groups.cpu_s().values())
        self._pipe.send(job(asked, self._pipeline, together))
        turn: Turn = self._receive()
        turn.cpu_s = (sum(self._groups.cpu_s().values()) - before_s) / len(asked)
        return turn

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            sys.exit(f"diffusers ended:\n{self._log_file.read_text(errors='replace')[-LOG_TAIL_CHARACTERS:]}")

    def close(self) -> None:
        """Ends it."""
        self._pipe.close()
        self._process.join(timeout=STOP_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
