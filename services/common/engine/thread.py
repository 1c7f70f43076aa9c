"""An engine's own thread, which runs one step after the other; and a clock of waits."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import structlog
import torch

from services.common.engine.device import make_current
from services.common.engine.process import lower_priority
from services.common.errors import InternalError, StageError, Unavailable

log = structlog.get_logger()


class ThreadedEngine(ABC):
    """Works on many requests in one thread until it is stopped or a step fails, which ends every request. A subclass
    starts `_thread`.

    Args:
        stage: its name.
        device: that the thread computes on.
        on_fatal: called in the thread with what broke it, after every request was ended.
        title: its name for people; default: `stage`.

    Attributes:
        changed: guards what the thread shares with others, and wakes it.
    """

    def __init__(
        self, stage: str, device: torch.device, on_fatal: Callable[[BaseException], object], title: str = ""
    ) -> None:
        self.changed = threading.Condition()
        self._title, self._device, self._on_fatal = title or stage, device, on_fatal
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"{stage}-engine", daemon=True)

    def stop(self) -> None:
        """Ends the thread after the running step; open requests fail with Unavailable."""
        with self.changed:
            self._stopping = True
            self._wake()
        self._thread.join()

    def _wake(self) -> None:
        """Wakes the thread. Under the lock."""
        self.changed.notify()

    def _check_running(self) -> None:
        """Under the lock, before a request is taken. Raises Unavailable: the engine failed or is stopped."""
        if self._stopping:
            raise Unavailable(f"{self._title}'s engine has stopped")

    @abstractmethod
    def _work(self) -> None:
        """Waits for work or `_stopping`, and does one step. In the thread."""

    @abstractmethod
    def _end_all(self, error: StageError) -> None:
        """Ends every waiting or running request. In the thread, after its last step."""

    def _run(self) -> None:
        make_current(self._device)
        if self._device.type == "cpu":
            lower_priority()
        try:
            while not self._stopping:
                self._work()
            self._end_all(Unavailable(f"{self._title} is shutting down"))
        except BaseException as error:
            log.exception("the engine failed")
            with self.changed:
                self._stopping = True
            self._end_all(InternalError(f"{self._title}'s engine failed; its log has the details"))
            self._on_fatal(error)


class WaitClock:
    """Adds up waits: `waited_ms` up to the last `set`."""

    def __init__(self) -> None:
        self.waited_ms = 0.0
        self._since: float | None = None

    def set(self, waits: bool) -> None:
        now = time.monotonic()
        if self._since is not None:
            self.waited_ms += (now - self._since) * 1000
        self._since = now if waits else None
