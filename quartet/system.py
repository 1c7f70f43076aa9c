"""The stages behind an Omni: its own, which it starts and ends, or others' that run already."""

import asyncio
import atexit
import json
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from cli.plan import GATEWAY, PIPELINE, Options, Tls, pipeline_for
from cli.supervisor import Supervisor
from gateway.pipeline.config import load_pipeline
from gateway.pipelines import SHIPPED, pipeline_file
from quartet.errors import StartError, as_start_errors
from quartet.loops import LoopThread

log = logging.getLogger("quartet")
Addresses = Mapping[str, str | list[str]]


class Setup(TypedDict, total=False):
    """Where the stages of an Omni are, and how it asks them.

    Attributes:
        pipeline: YAML file, or name of a shipped one; default: that of the model's family, or of `address`.
        dit_model: the dit's checkpoint, beside stages of other kinds.
        stages: settings of stages to start, by kind: {"thinker": {"max_model_len": 8192}}; docs/services.md lists them.
        run_directory: for the stages' logs and state.json; default: a temporary one, which goes with the Omni.
        address: stages that run already: {"thinker": "host:port", ...} by their names in the pipeline, or the directory
            that `quartet up --run-dir` was given. Nothing is started then.
        tls: certificates for the connections to the stages.
        concurrency: prompts under way at a time; more wait. Default 64.
        timeout_s: longest that one of them may take, waiting for a restarted stage included. Default 600.
    """

    pipeline: str | Path
    dit_model: str
    stages: Mapping[str, Mapping[str, Any]]
    run_directory: str | Path
    address: Addresses | str | Path
    tls: Tls
    concurrency: int
    timeout_s: float


@dataclass
class Deployment:
    """Stages that run.

    Attributes:
        pipeline: the file that describes them.
        addresses: of the stages, by name; those of the file for others.
        tls: how they are reached.
        processes: those that were started for this.
    """

    pipeline: Path
    addresses: Addresses
    tls: Tls = field(default_factory=Tls)
    processes: "StageProcesses | None" = None


class StageProcesses:
    """Stages of our own, supervised in a thread of their own.

    Linux kills a child when the thread that started it ends (PR_SET_PDEATHSIG). So it must be one that lives as long as
    the stages, whatever thread made this.

    Raises:
        CommandError: the options do not fit, or name what cannot be used.
    """

    def __init__(self, options: Options) -> None:
        self._process_id = os.getpid()
        self._supervisor = Supervisor(options, progress=_log_progress)
        self._thread = LoopThread("quartet-stages", asyncio.new_event_loop)
        self._starting: Future[None] | None = None
        self._closing = False
        self.addresses, self.run_directory = self._supervisor.addresses, self._supervisor.run_directory
        _running.add(self)

    async def start(self) -> None:
        """Returns when all stages serve. From then on one that dies is restarted. For any event loop.

        Raises:
            StartError: of `cli.plan`: a stage ended before all served.
        """
        self._starting = self._thread.begin(self._supervisor.start())
        await asyncio.wrap_future(self._starting)

    @property
    def is_ours(self) -> bool:
        """Whether this process started them: one that was forked from it has not, and has no thread for them."""
        return self._process_id == os.getpid()

    def begin_to_close(self) -> None:
        """Has the stages stopped, without waiting for that. For any thread, and again."""
        if self._closing or not self.is_ours:
            return
        self._closing = True
        if self._starting is not None:
            self._starting.cancel()
        self._thread.end(self._stop)

    async def _stop(self) -> None:
        await self._supervisor.stop()
        _running.discard(self)

    def wait_closed(self) -> None:
        """Returns when nothing is left of them. Blocking: an event loop calls `closed`."""
        if self.is_ours:
            self._thread.join()

    async def closed(self) -> None:
        """Returns when nothing is left of them."""
        while self.is_ours and not self._thread.has_ended:  # noqa: ASYNC110  there is no event for it
            await asyncio.sleep(0.02)  # not in a thread: at the interpreter's exit none can be had


_running: set[StageProcesses] = set()


@atexit.register
def _close_all() -> None:
    """What nobody has closed by the interpreter's exit."""
    for processes in list(_running):
        processes.begin_to_close()
    for processes in list(_running):
        processes.wait_closed()


def deployment_for(model: str | os.PathLike[str] | None, setup: Setup) -> Deployment:
    """Where the stages are; those that are to be started are not yet.

    Raises:
        StartError: what the caller says does not fit together, or names what cannot be used.
    """
    tls, address = setup.get("tls") or Tls(), setup.get("address")
    named = setup.get("pipeline")
    if (model is None) == (address is None):
        reason = "say model, a checkpoint to start, or address, stages that run already"
        raise StartError(f"model: {reason}; not both" if model is not None else f"model: {reason}", "model")
    with as_start_errors():
        if model is not None:
            return _new_deployment(os.fspath(model), setup, tls, named)
        for name in ("dit_model", "stages", "run_directory"):
            if name in setup:
                raise StartError(f"{name}: only for stages that are started; leave it out beside address", name)
        assert address is not None
        if isinstance(address, Mapping):
            file = pipeline_file(Path(named)) if named is not None else _pipeline_of(address)
            return Deployment(file, address, tls)
        return _running_deployment(Path(address), named, tls)


def _new_deployment(model: str, setup: Setup, tls: Tls, named: str | Path | None) -> Deployment:
    run_directory = setup.get("run_directory")
    options = Options(
        model,
        pipeline=Path(named) if named is not None else pipeline_for(model),
        run_directory=None if run_directory is None else Path(run_directory),
        stage_arguments={kind: _flags(kind, settings) for kind, settings in (setup.get("stages") or {}).items()},
        dit_model=setup.get("dit_model"),
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
    """The shipped pipeline whose stages are those that have an address."""
    for file in (PIPELINE, *sorted(SHIPPED.glob("*.yaml"))):
        if load_pipeline(file).stages.keys() == address.keys():
            return file
    names = ", ".join(address)
    raise StartError(f"address: no shipped pipeline has the stages {names}; say which pipeline they are of", "address")


def _running_deployment(run_directory: Path, named: str | Path | None, tls: Tls) -> Deployment:
    try:
        state = json.loads((run_directory / "state.json").read_text())
        file = Path(named) if named is not None else Path(state["pipeline"])
        addresses = {name: at["address"] for name, at in state["processes"].items() if name != GATEWAY}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{run_directory} has no state.json of a running system: {error}"
        raise StartError(f"address: {reason}; give the directory of `quartet up --run-dir`", "address") from None
    return Deployment(pipeline_file(file), addresses, tls)


def _log_progress(name: str, what: str) -> None:
    (log.info if what == "ready" else log.warning)("%s %s", name, what)


def close_when_forgotten(owner: object, processes: StageProcesses) -> None:
    """Has the stages stopped when nobody can reach `owner` any more. That may be found in any thread, so nothing is
    waited for."""
    weakref.finalize(owner, processes.begin_to_close).atexit = False
