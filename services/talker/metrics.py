"""Prometheus metrics that only the talker has, beside `services.common.metrics`."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.metrics import STEP_BUCKETS_S

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
STEP_ROWS = Histogram("quartet_talker_step_rows", "Frames made in a step", buckets=(1, 2, 4, 8, 16, 32, 64, 128))
STEP_SECONDS = Histogram(
    "quartet_talker_step_seconds",
    "Time of a step, codes on the host, without prefill",
    buckets=STEP_BUCKETS_S,
)
