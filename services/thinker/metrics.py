"""Prometheus metrics that only the thinker has."""

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge

from services.common.telemetry import metrics
from services.thinker.step_stats import StepStats

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

REQUESTS_RUNNING = Gauge("quartet_thinker_requests_running", "Requests in the engine's steps")
REQUESTS_WAITING = Gauge("quartet_thinker_requests_waiting", "Requests that wait for the engine to begin with them")
TOKENS = Counter("quartet_thinker_tokens_total", "Tokens of prompts that were computed, and tokens generated", ["kind"])
PREFIX_QUERIES = Counter("quartet_thinker_prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache")
PREFIX_HITS = Counter("quartet_thinker_prefix_cache_hits_total", "Of these, tokens that it had")
PREEMPTIONS = Counter("quartet_thinker_preemptions_total", "Requests set back because the KV cache was full")
STEP_SECONDS = metrics.STEP_SECONDS.labels("thinker", "step")
STEP_BATCH = metrics.STEP_BATCH.labels("thinker", "step")
KV_CACHE_USED = metrics.KV_CACHE_USED.labels("thinker")


def kv_cache_usage() -> float:
    """Part of the KV cache's blocks in use when the last step ended, 0 to 1."""
    return next(sample.value for metric in KV_CACHE_USED.collect() for sample in metric.samples)


class EngineStats(StepStats):
    """Of the thinker's steps."""

    def record(
        self,
        scheduler_stats: "SchedulerStats | None",
        iteration_stats: "IterationStats | None",
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        running = scheduler_stats.num_running_reqs
        if (seconds := self.seconds_of_step(running > 0)) is not None:
            STEP_SECONDS.observe(seconds)
        if running:
            STEP_BATCH.observe(running)
        REQUESTS_RUNNING.set(running)
        REQUESTS_WAITING.set(scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs)
        KV_CACHE_USED.set(scheduler_stats.kv_cache_usage)
        PREFIX_QUERIES.inc(scheduler_stats.prefix_cache_stats.queries)
        PREFIX_HITS.inc(scheduler_stats.prefix_cache_stats.hits)
        if iteration_stats is not None:
            TOKENS.labels("prompt").inc(iteration_stats.prompt_token_stats.computed)
            TOKENS.labels("generated").inc(iteration_stats.num_generation_tokens)
            PREEMPTIONS.inc(iteration_stats.num_preempted_reqs)
