"""Prometheus metrics that only the diffusion stage has, beside `services.common.telemetry.metrics`."""

from prometheus_client import Gauge

RUNNING = Gauge("quartet_dit_outputs_running", "Outputs between their first step and their end")
WAITING = Gauge("quartet_dit_outputs_waiting", "Outputs that wait for others to end")
