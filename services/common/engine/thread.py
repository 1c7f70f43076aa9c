"""An engine's own thread, which runs one step after the other; and the clock of a request that stands still there."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import structlog
import torch

from services.common.engine.device import make_current
from services.common.engine.process import lower_engine_priority
from services.common.errors import InternalError, StageError, Unavailable

log = structlog.get_logger()


class ThreadedEngine(ABC):
    """Works on many requests in one thread until it is stopped or a step fails; then every request is told.

    A subclass starts `_thread` when it is made whole.

    Args:
        stage: its name.
        device: that the thread computes on.
        on_fatal: called in the engine's thread with what broke it, after every request was told.
        title: its name for people, where that is another.

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
        """Ends the thread after the step that runs; requests that are not done fail with Unavailable."""
        with self.changed:
            self._stopping = True
            self._wake()
        self._thread.join()

    def _wake(self) -> None:
        """Ends the wait of the thread. Called under the lock."""
        self.changed.notify()

    def _check_running(self) -> None:
        """To be called under the lock, before a request is taken.

        Raises:
            Unavailable: the engine failed or is stopped.
        """
        if self._stopping:
            raise Unavailable(f"{self._title}'s engine has stopped")

    @abstractmethod
    def _work(self) -> None:
        """Waits until there is something to do, or until `_stopping`, and does it: one step. In the thread."""

    @abstractmethod
    def _end_all(self, error: StageError) -> None:
        """Ends every request, waiting or running, with `error`. In the thread, after its last step."""

    def _run(self) -> None:
        make_current(self._device)
        if self._device.type == "cpu":
            lower_engine_priority()
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
    """Adds up the time for which something waits, whatever for."""

    def __init__(self) -> None:
        self.waited_ms = 0.0
        """Milliseconds up to the last `set`."""
        self._since: float | None = None

    def set(self, waits: bool) -> None:
        """Whether it waits from now on."""
        now = time.monotonic()
        if self._since is not None:
            self.waited_ms += (now - self._since) * 1000
        self._since = now if waits else None
