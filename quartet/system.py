"""The stages of an Omni: its own, or others that run already."""

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from cli.plan import GATEWAY, PIPELINE, LaunchOptions, Tls, pipeline_for
from cli.supervisor import Supervisor
from gateway.pipeline.config import ALIGNER, load_pipeline
from gateway.pipelines import SHIPPED, pipeline_file
from quartet.errors import StartError, as_start_errors
from quartet.loops import LoopThread

log = logging.getLogger("quartet")
Addresses = Mapping[str, str | list[str]]


class Setup(TypedDict, total=False):
    """Stages of an Omni and its limits.

    Attributes:
        pipeline: YAML file, or name of a shipped one; default: that of the model's family, or of `address`.
        dit_model: checkpoint of a dit beside other stages.
        asr_model: checkpoint of a thinker that writes down what the model is to hear.
        talker_model: checkpoint of a voice that speaks what the model writes.
        stages: settings of stages to start, by kind: {"thinker": {"max_context_tokens": 8192}}; see docs/services.md.
            "asr" are those of the thinker that `asr_model` is for.
        run_directory: for logs and state.json; default: a temporary one.
        address: running stages: {"thinker": "host:port", ...} by name, or a directory of `quartet up --run-dir`.
        tls: certificates for the stages.
        concurrency: prompts at a time; more wait. Default 64.
        timeout_s: longest time of a prompt, a stage's restart included. Default 600.
    """

    pipeline: str | Path
    dit_model: str
    asr_model: str
    talker_model: str
    stages: Mapping[str, Mapping[str, Any]]
    run_directory: str | Path
    address: Addresses | str | Path
    tls: Tls
    concurrency: int
    timeout_s: float


@dataclass
class Deployment:
    """Stages in use.

    Attributes:
        pipeline: YAML file.
        addresses: by stage; others have the file's.
        processes: stages started here.
    """

    pipeline: Path
    addresses: Addresses
    tls: Tls = field(default_factory=Tls)
    processes: "StageProcesses | None" = None


class StageProcesses:
    """Stages of our own, supervised in a thread, whose end would kill them (PR_SET_PDEATHSIG).

    Raises:
        CommandError: the options do not fit, or name what cannot be used.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self._supervisor = Supervisor(options, progress=_log_progress)
        self._thread = LoopThread("quartet-stages", asyncio.new_event_loop, self._stop)
        self._starting: Future[None] | None = None
        self.addresses, self.run_directory = self._supervisor.addresses, self._supervisor.run_directory
        for line in self._supervisor.gpu_shares:
            log.info("%s", line)

    async def start(self) -> None:
        """Returns when all stages serve. Raises LaunchError: a stage ended before."""
        self._starting = self._thread.begin(self._supervisor.start())
        await asyncio.wrap_future(self._starting)

    def begin_to_close(self) -> None:
        """Stops the stages without waiting. For any thread; may be called again."""
        self._thread.end()

    async def _stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        await self._supervisor.stop()

    async def closed(self) -> None:
        while not self._thread.has_ended:  # noqa: ASYNC110  there is no event for it
            await asyncio.sleep(0.02)  # no thread can be started at the interpreter's exit


def deployment_for(model: str | os.PathLike[str] | None, setup: Setup) -> Deployment:
    """The deployment that the caller describes, not started yet.

    Raises:
        StartError: the arguments contradict each other, or name what cannot be used.
    """
    tls, address = setup.get("tls") or Tls(), setup.get("address")
    named = setup.get("pipeline")
    if (model is None) == (address is None):
        reason = "say model, a checkpoint to start, or address, stages that run already"
        raise StartError(f"model: {reason}; not both" if model is not None else f"model: {reason}", "model")
    with as_start_errors():
        if model is not None:
            return _new_deployment(os.fspath(model), setup, tls, named)
        for name in ("dit_model", "asr_model", "talker_model", "stages", "run_directory"):
            if name in setup:
                raise StartError(f"{name}: only for stages that are started; leave it out beside address", name)
        assert address is not None
        if isinstance(address, Mapping):
            file = pipeline_file(Path(named)) if named is not None else _pipeline_of(address)
            return Deployment(file, address, tls)
        return _running_deployment(Path(address), named, tls)


def _new_deployment(model: str, setup: Setup, tls: Tls, named: str | Path | None) -> Deployment:
    run_directory = setup.get("run_directory")
    others = setup.get("talker_model"), setup.get("asr_model")
    options = LaunchOptions(
        model,
        pipeline=pipeline_for(model, *others) if named is None else Path(named),
        run_directory=None if run_directory is None else Path(run_directory),
        stage_arguments={kind: _flags(kind, settings) for kind, settings in (setup.get("stages") or {}).items()},
        dit_model=setup.get("dit_model"),
        asr_model=setup.get("asr_model"),
        talker_model=setup.get("talker_model"),
        tls=tls,
        has_gateway=False,
    )
    processes = StageProcesses(options)
    return Deployment(options.pipeline, processes.addresses, tls, processes)


def _flags(kind: str, settings: Mapping[str, Any]) -> list[str]:
    if kind == GATEWAY:
        raise StartError("stages.gateway: none is started; see concurrency and timeout_s", "stages.gateway")
    flags = []
    for name, value in settings.items():
        for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            text = str(each).lower() if isinstance(each, bool) else str(each)
            flags.append(f"--{name.replace('_', '-')}={text}")
    return flags


def _pipeline_of(address: Addresses) -> Path:
    for file in (PIPELINE, *sorted(SHIPPED.glob("*.yaml"))):
        if load_pipeline(file).stages.keys() == address.keys():
            return file
    names = ", ".join(address)
    raise StartError(f"address: no shipped pipeline has the stages {names}; say which pipeline they are of", "address")


def _running_deployment(run_directory: Path, named: str | Path | None, tls: Tls) -> Deployment:
    try:
        state = json.loads((run_directory / "state.json").read_text())
        file = Path(named) if named is not None else Path(state["pipeline"])
        others = {GATEWAY, ALIGNER} - load_pipeline(pipeline_file(file)).stages.keys()  # no file has an added aligner
        addresses = {name: at["address"] for name, at in state["processes"].items() if name not in others}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{run_directory} has no state.json of a running system: {error}"
        raise StartError(f"address: {reason}; give the directory of `quartet up --run-dir`", "address") from None
    return Deployment(pipeline_file(file), addresses, tls)


def _log_progress(name: str, what: str) -> None:
    (log.info if what == "ready" else log.warning)("%s %s", name, what)
