"""Prometheus metrics that only the embedder has."""

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge

from services.common.telemetry import metrics
from services.thinker.step_stats import StepStats

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


class PoolingStats(StepStats):
    """Of the embedder's steps."""

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
        runs_on = scheduler_stats.num_running_reqs + scheduler_stats.num_waiting_reqs > 0
        if (seconds := self.seconds_of_step(runs_on)) is not None:
            STEP_SECONDS.observe(seconds)
        INPUTS_RUNNING.set(scheduler_stats.num_running_reqs)
        INPUTS_WAITING.set(scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs)
