"""Prometheus metrics that only the talker has, and its own of `services.common.telemetry.metrics`."""

from prometheus_client import Counter, Gauge

from services.common.telemetry import metrics

REQUESTS_WAITING = Gauge("quartet_talker_requests_waiting", "Requests that wait for a slot")
REQUESTS_RUNNING = Gauge("quartet_talker_requests_running", "Requests that have a slot")
REQUESTS_PARKED = Gauge(
    "quartet_talker_requests_parked",
    "Requests with a slot that cannot have a frame now, by what they wait for: the thinker's next token (text), or "
    "their consumer (consumer)",
    ["reason"],
)
FRAMES = Counter("quartet_talker_frames_total", "Codec frames made")
PREFILL_POSITIONS = Counter("quartet_talker_prefill_positions_total", "Prompt positions run")
STEP_SECONDS = metrics.STEP_SECONDS.labels("talker", "frame")  # prefill not counted
STEP_BATCH = metrics.STEP_BATCH.labels("talker", "frame")
KV_CACHE_USED = metrics.KV_CACHE_USED.labels("talker")
