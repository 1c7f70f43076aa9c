"""Prometheus metrics that only the thinker has, beside those of `services.common.telemetry.metrics` and vLLM."""

from prometheus_client import Counter, Gauge

from services.common.telemetry import metrics

REQUESTS_RUNNING = Gauge("quartet_thinker_requests_running", "Requests in the engine's steps")
REQUESTS_WAITING = Gauge("quartet_thinker_requests_waiting", "Requests that wait for the engine to begin with them")
TOKENS = Counter("quartet_thinker_tokens_total", "Tokens of prompts that were computed, and tokens generated", ["kind"])
PREFIX_QUERIES = Counter("quartet_thinker_prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache")
PREFIX_HITS = Counter("quartet_thinker_prefix_cache_hits_total", "Of these, tokens that it had")
PREEMPTIONS = Counter("quartet_thinker_preemptions_total", "Requests set back because the KV cache was full")
STEP_SECONDS = metrics.STEP_SECONDS.labels("thinker", "step")
STEP_BATCH = metrics.STEP_BATCH.labels("thinker", "step")
KV_CACHE_USED = metrics.KV_CACHE_USED.labels("thinker")
