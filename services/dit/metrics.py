"""Prometheus metrics that only the dit has, beside `services.common.metrics`."""

from prometheus_client import Gauge, Histogram

RUNNING = Gauge("quartet_dit_outputs_running", "Outputs between their first step and their end")
WAITING = Gauge("quartet_dit_outputs_waiting", "Outputs that wait for others to end")
STEP_SECONDS = Histogram(
    "quartet_dit_step_seconds",
    "Time of one call of a model: transformer (a denoising step, or a half of one with guidance) or vae.decode",
    ["call"],
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
STEP_OUTPUTS = Histogram(
    "quartet_dit_step_outputs", "Outputs that shared such a call", ["call"], buckets=(1, 2, 4, 8, 16, 32)
)
