"""Tells the engine of a request while its prompt is still made: until it comes, a step of a batch's lines would be in
its way."""

import mmap
import time
from pathlib import Path

_FILE = "expected"
_BYTES = 8
_PREPARED_S = 0.05  # by then a prompt of text is there


class Expected:
    """A moment that the processes of a thinker share: until then somebody may come.

    Args:
        directory: see `environment.scratch_dir`.
    """

    def __init__(self, directory: Path) -> None:
        with (directory / _FILE).open("a+b") as file:
            file.truncate(_BYTES)
            self._until_s = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("d")  # of time.monotonic()

    def announce(self, for_s: float = _PREPARED_S) -> None:
        """Somebody comes within this time."""
        self._until_s[0] = time.monotonic() + for_s

    def is_near(self) -> bool:
        """Whether somebody was announced, and the time has not passed."""
        return time.monotonic() < self._until_s[0]
