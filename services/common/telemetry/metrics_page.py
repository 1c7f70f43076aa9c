"""Pages of metrics, which cost time and which anyone may ask for: made anew so often and no oftener."""

import threading
import time
from collections.abc import Callable


class MetricsPage:
    """What `make` returns. In `kept_s` seconds it is made once, and whoever asks gets the same. For any thread."""

    def __init__(self, make: Callable[[], bytes], kept_s: float) -> None:
        self._make, self._kept_s = make, kept_s
        self._page, self._made_s = b"", -float("inf")
        self._lock = threading.Lock()

    def read(self) -> bytes:
        with self._lock:
            if time.monotonic() - self._made_s >= self._kept_s:
                self._page = self._make()
                self._made_s = time.monotonic()
            return self._page
