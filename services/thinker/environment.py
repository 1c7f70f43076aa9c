"""What vLLM's processes find: environment variables, the format of logs, a directory for temporary files. There each
keeps its errors, which vLLM does not tell its parent."""

import contextlib
import fcntl
import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from services.common import failures
from services.common.engine.process import end_now
from services.common.telemetry import logs
from services.thinker import cpu, device
from services.thinker.config import VllmSettings
from services.thinker.plugin import SCRATCH_DIR

_VLLM_LOG_LEVEL = "VLLM_LOGGING_LEVEL"
_LOG_LEVEL = "QUARTET_THINKER_LOG_LEVEL"
_STAGE = "QUARTET_VLLM_STAGE"  # in the log lines of vLLM's processes
_SOCKETS_DIR = "VLLM_RPC_BASE_PATH"
_MOST_SOCKETS_DIR = 64  # characters: the path of a socket has at most 107
SCRATCH_PREFIX = "quartet-thinker-"
ERRORS_FILE = "errors.jsonl"
_NO_KERNELS = "Failed to import from vllm"  # vLLM logs it as a warning, and fails elsewhere later


def configure(settings: VllmSettings, stage: str = "thinker") -> None:
    """Call before vLLM or transformers is imported: they read the variables then. What the operator set stays as it is.

    Args:
        stage: whose engine it is, for the log.

    Raises:
        ValueError: vLLM cannot run on the device that `settings` name, or on this CPU.
    """
    visible = device.visible_devices(
        settings.device,
        settings.tensor_parallel_size,
        for_cpus=cpu.vllm_is_for_cpus(),
        cuda_devices=torch.cuda.device_count(),  # by NVML: CUDA, which reads the variable once, stays untouched
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    if cpu.vllm_is_for_cpus() and (lacks := cpu.lacks()):
        raise ValueError(lacks)
    os.environ[_STAGE] = stage
    os.environ[_LOG_LEVEL] = settings.log_level  # for vLLM's processes, which are not given the flags
    for name, value in defaults(settings).items():
        os.environ.setdefault(name, value)


def defaults(settings: VllmSettings) -> dict[str, str]:
    """Variables that an operator may set otherwise."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "0",  # configure_logs does it
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # its lines are in no format
        _VLLM_LOG_LEVEL: "DEBUG" if settings.log_level == "debug" else "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not device.has_flashinfer_kernels():
        # vLLM's sampler would compile FlashInfer's when they are first used, for minutes, and die where it cannot
        variables[device.SAMPLER_VARIABLE] = "0"
    if settings.compile != "on" and cpu.vllm_is_for_cpus():
        # vLLM's sampler compiles a few small functions when they are first used, which stops a CPU for 15 s
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if settings.tensor_parallel_size > 1 and cpu.vllm_is_for_cpus():
        # vLLM's own choice is a NUMA node for each process, and an error where there are fewer
        variables["VLLM_CPU_OMP_THREADS_BIND"] = cores_of_ranks(
            sorted(os.sched_getaffinity(0)), settings.tensor_parallel_size
        )
    if Path(settings.model).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    return variables


def cores_of_ranks(cores: Sequence[int], ranks: int) -> str:
    """The `cores`, shared out evenly among the processes of a model on CPUs, in vLLM's notation.

    Neighbours stay together, as NUMA nodes usually number their cores in turn. Threads are not bound if there are fewer
    cores than processes."""
    if len(cores) < ranks:
        return "nobind"
    bounds = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    return "|".join(",".join(map(str, cores[a:b])) for a, b in itertools.pairwise(bounds))


def configure_logs() -> None:
    """Sends this process's log lines, vLLM's among them, to stderr in Quartet's format.

    Call after `configure` and before vLLM is imported, also in the processes that vLLM spawns.
    """
    logs.configure(os.environ[_LOG_LEVEL], os.environ.get(_STAGE, "thinker"))
    logging.getLogger("vllm").setLevel(os.environ[_VLLM_LOG_LEVEL].upper())


@contextlib.contextmanager
def scratch_dir() -> Iterator[Path]:
    """Gives temporary files of this process and its children a directory of their own. It is removed with the context;
    if this process is killed, by the engine, else by the next thinker here. Other users cannot enter it."""
    parent = tempfile.gettempdir()
    before = {name: os.environ.get(name) for name in ("TMPDIR", SCRATCH_DIR, _SOCKETS_DIR)}
    with contextlib.ExitStack() as made:
        path = made.enter_context(_made(Path(parent)))
        is_short = len(str(path)) <= _MOST_SOCKETS_DIR
        sockets = path if is_short else made.enter_context(_made(Path("/tmp")))
        os.environ["TMPDIR"] = os.environ[SCRATCH_DIR] = tempfile.tempdir = str(path)
        os.environ.setdefault(_SOCKETS_DIR, str(sockets))
        try:
            yield path
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            tempfile.tempdir = parent


def sockets_dir() -> str:
    """Where the sockets between this process and its children are, inside of `scratch_dir`."""
    return os.environ[_SOCKETS_DIR]


@contextlib.contextmanager
def _made(parent: Path) -> Iterator[Path]:
    path, lock = _make_scratch(parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _make_scratch(parent: Path) -> tuple[Path, int]:
    """A new directory, and the descriptor that keeps it locked. Removes directories that nobody holds."""
    for orphan in parent.glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody's
            lock = _lock(orphan, fcntl.LOCK_NB)
            shutil.rmtree(orphan, ignore_errors=True)
            os.close(lock)
    while True:
        path = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError):  # another thinker has taken it for an orphan
            lock = _lock(path)
            if path.exists():
                return path, lock
            os.close(lock)


def _lock(directory: Path, flags: int = 0) -> int:
    """A descriptor that holds the lock of `directory` until it is closed.

    Raises:
        OSError: there is no such directory, or, with LOCK_NB, another process holds the lock.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class _Keeper(logging.Handler):
    """Appends errors to a file, as JSON strings "Type: message"."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.WARNING)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        message = record.getMessage()
        if error is not None:
            self.keep(error)
        elif message.startswith(_NO_KERNELS):
            self._write(message)

    def keep(self, error: BaseException) -> None:
        self._write(f"{type(error).__name__}: {error}")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError), self._file.open("a") as file:  # e.g. no room; the log has it all the same
            file.write(json.dumps(text) + "\n")


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and record.exc_info[1] is not None:
        record.msg, record.args = f"{record.getMessage()}: {failures.sentence(record.exc_info[1])}", ()
        record.exc_info = None
    return True


def keep_errors(with_tracebacks: bool) -> None:
    """Keeps the errors of a process that vLLM has spawned for `failure`. Call it once its logs are configured.

    Args:
        with_tracebacks: whether its log has tracebacks.
    """
    directory = os.environ.get(SCRATCH_DIR)
    keeper = _Keeper(Path(directory, ERRORS_FILE)) if directory else None
    if keeper is not None:
        logging.getLogger().handlers.insert(0, keeper)
    if not with_tracebacks:
        for handler in logging.getLogger().handlers:
            if handler is not keeper:
                handler.addFilter(_without_traceback)

    run = BaseProcess.run

    def run_and_end(self: BaseProcess) -> None:
        status = 0
        try:
            run(self)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception as error:
            if keeper is not None:
                keeper.keep(error)
            if with_tracebacks:
                raise
            status = 1  # multiprocessing would print the traceback, in no format; the log has the error
        end_now(status)

    BaseProcess.run = run_and_end


def failure(directory: Path, error: BaseException) -> str | None:
    """Why no engine could start, in one sentence, if another process has kept the reason in `directory`.

    `error` is what vLLM raised here.
    """
    try:
        kept = [json.loads(line) for line in (directory / ERRORS_FILE).read_text().splitlines()]
    except OSError:
        kept = []
    return failures.first_cause(kept) or failures.ended_child(str(error))


if __name__ == "__mp_main__":  # in each process that vLLM spawns, before anything of vLLM's is imported there
    configure_logs()
    keep_errors(failures.shows_tracebacks() or os.environ[_LOG_LEVEL] == "debug")
