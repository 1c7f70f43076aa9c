"""Prometheus metrics of a stage: the same names everywhere, the label `stage` tells them apart."""

from prometheus_client import Counter, Gauge, Histogram

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # of an engine's steps
_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

REQUESTS = Counter("quartet_requests_total", "Requests ended, by outcome (a gRPC status name)", ["stage", "outcome"])
IN_FLIGHT = Gauge("quartet_requests_in_flight", "Requests running or queued", ["stage"])
FIRST_OUTPUT = Histogram(
    "quartet_first_output_seconds",
    "From acceptance to the first token, codec frame or sample",
    ["stage"],
    buckets=_LATENCY_BUCKETS_S,
)
DURATION = Histogram(
    "quartet_request_seconds", "From acceptance to the end of a request", ["stage"], buckets=_LATENCY_BUCKETS_S
)
STREAM_BYTES = Counter("quartet_stream_bytes_total", "Tensor payload sent to consumers", ["stage", "rows"])
STREAM_PENDING = Gauge(
    "quartet_stream_positions_pending",
    "Positions made that wait for their consumers' credit, of all streams",
    ["stage"],
)
