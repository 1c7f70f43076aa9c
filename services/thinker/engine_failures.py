"""Why the engine's process failed, which vLLM does not tell its parent: each process that vLLM spawns writes its errors
to a file in the thinker's directory of temporary files."""

import contextlib
import json
import logging
import os
from multiprocessing.process import BaseProcess
from pathlib import Path

from services.common import failures
from services.common.engine.process import end_now
from services.thinker.plugin import SCRATCH_DIR

FILE = "errors.jsonl"
_NO_KERNELS = "Failed to import from vllm"  # vLLM logs it as a warning, and fails elsewhere later


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
    """Keeps the errors of a process that vLLM has spawned for `cause`. Call it once its logs are configured.

    Args:
        with_tracebacks: whether its log has tracebacks.
    """
    directory = os.environ.get(SCRATCH_DIR)
    keeper = _Keeper(Path(directory, FILE)) if directory else None
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


def cause(directory: Path, error: BaseException) -> str | None:
    """Why no engine could start, in one sentence, if another process has kept the reason in `directory`.

    `error` is what vLLM raised here.
    """
    try:
        kept = [json.loads(line) for line in (directory / FILE).read_text().splitlines()]
    except OSError:
        kept = []
    return failures.first_cause(kept) or failures.ended_child(str(error))
