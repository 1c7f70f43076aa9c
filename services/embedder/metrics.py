"""Prometheus metrics that only the embedder has."""

import time
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge

from services.common.telemetry import metrics

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

INPUTS_RUNNING = Gauge("quartet_embedder_inputs_running", "Texts, or pairs, in the engine's steps")
INPUTS_WAITING = Gauge(
    "quartet_embedder_inputs_waiting", "Texts, or pairs, that wait for the engine to begin with them"
)
INPUTS = Counter("quartet_embedder_inputs_total", "Texts, or pairs, that were computed")
TOKENS = Counter("quartet_embedder_tokens_total", "Their tokens")
STEP_SECONDS = metrics.STEP_SECONDS.labels("embedder", "step")
STEP_BATCH = metrics.STEP_BATCH.labels("embedder", "step")


class PoolingStats:
    """Takes the statistics of each step, on the event loop. An error would end the engine's output. It has the methods
    of vLLM's StatLoggerBase without importing vLLM."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._before: float | None = None  # when the last step ended, if inputs ran on

    def record(
        self,
        scheduler_stats: "SchedulerStats | None",
        iteration_stats: "IterationStats | None",
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None and (ended := len(iteration_stats.finished_requests)):
            STEP_BATCH.observe(ended)
        if scheduler_stats is None:
            return
        now, running = time.monotonic(), scheduler_stats.num_running_reqs + scheduler_stats.num_waiting_reqs
        if self._before is not None:
            STEP_SECONDS.observe(now - self._before)
        self._before = now if running else None
        INPUTS_RUNNING.set(scheduler_stats.num_running_reqs)
        INPUTS_WAITING.set(scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs)

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...
