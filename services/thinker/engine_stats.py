"""What vLLM says of each step of its engine, as Quartet's metrics. Imports vLLM: for the engine's module only."""

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from services.thinker import metrics


class EngineStats(StatLoggerBase):
    """Takes the statistics that come with each step's outputs. Called on the event loop; an error here would end the
    engine's output, so this only copies numbers."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._before: float | None = None  # when the last step ended, if requests ran on

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        now, running = time.monotonic(), scheduler_stats.num_running_reqs
        if self._before is not None:
            metrics.STEP_SECONDS.observe(now - self._before)
        self._before = now if running else None
        if running:
            metrics.STEP_BATCH.observe(running)
        metrics.REQUESTS_RUNNING.set(running)
        metrics.REQUESTS_WAITING.set(scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs)
        metrics.KV_CACHE_USED.set(scheduler_stats.kv_cache_usage)
        metrics.PREFIX_QUERIES.inc(scheduler_stats.prefix_cache_stats.queries)
        metrics.PREFIX_HITS.inc(scheduler_stats.prefix_cache_stats.hits)
        if iteration_stats is not None:
            metrics.TOKENS.labels("prompt").inc(iteration_stats.prompt_token_stats.computed)
            metrics.TOKENS.labels("generated").inc(iteration_stats.num_generation_tokens)
            metrics.PREEMPTIONS.inc(iteration_stats.num_preempted_reqs)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
