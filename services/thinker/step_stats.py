"""What an engine of vLLM says of its steps, for metrics; imported where there are no engines, too."""

import time
from typing import Any


class StepStats:
    """Takes the statistics of each step, on the event loop, by a subclass's `record`. An error would end the engine's
    output. It has the methods of vLLM's StatLoggerBase without importing vLLM."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._before: float | None = None  # when the last step ended, if requests ran on

    def seconds_of_step(self, runs_on: bool) -> float | None:
        """How long the step took that ends now; None: the engine was idle before. `runs_on`: another one follows."""
        now, before = time.monotonic(), self._before
        self._before = now if runs_on else None
        return None if before is None else now - before

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...
