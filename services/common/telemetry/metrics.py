"""Metrics that all stages have, which the label `stage` tells apart; and the HTTP port of /metrics, /health and /ready.

A metric of one stage alone is in its engine.py (the thinker's are in its metrics.py).

/health and /ready are gRPC's health of "" and of the stage's service, for checks without gRPC or a certificate. 200:
SERVING; 503: not, with the reason. The event loop that serves requests makes the answer: if it hangs, the stage is not
ready.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    start_http_server,
)

from services.common.telemetry.metrics_page import MetricsPage

KEPT_S = 0.25  # a page takes a millisecond and more of the process, whoever asks for it
SILENCE_S = 10.0  # of a client, whose connection has a thread
PATIENCE_S = 4.0  # less than the timeouts of health checks (deploy/), so that the reason arrives

Health = Callable[[str], Coroutine[Any, Any, str]]

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# From a frame on a GPU to a denoising step of a large video.
_STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_CHUNK_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

REQUESTS = Counter("quartet_requests_total", "Requests ended, by outcome (a gRPC status name)", ["stage", "outcome"])
REFUSED = Counter(
    "quartet_requests_refused_total",
    "Requests refused at the door, by reason: queue_full, or not_serving (loading, draining)",
    ["stage", "reason"],
)
IN_FLIGHT = Gauge("quartet_requests_in_flight", "Requests running or queued", ["stage"])
RUNNING = Gauge("quartet_requests_running", "Requests admitted, up to as many as the engine works on", ["stage"])
QUEUED = Gauge("quartet_requests_queued", "Requests admitted beyond those, which wait for the engine", ["stage"])
FIRST_OUTPUT = Histogram(
    "quartet_first_output_seconds",
    "From acceptance to the first token, codec frame or sample",
    ["stage"],
    buckets=_LATENCY_BUCKETS_S,
)
DURATION = Histogram(
    "quartet_request_seconds", "From acceptance to the end of a request", ["stage"], buckets=_LATENCY_BUCKETS_S
)
STEP_SECONDS = Histogram(
    "quartet_step_seconds",
    "Time of an engine's step, results on the host. `call` is what runs: thinker step (from one step's tokens to the "
    "next's), talker frame, code2wav decode, encoder encode; dit transformer (a denoising step, or a half of one with "
    "guidance) or vae.decode",
    ["stage", "call"],
    buckets=_STEP_BUCKETS_S,
)
STEP_BATCH = Histogram(
    "quartet_step_batch_size",
    "Requests that shared such a step (dit: outputs)",
    ["stage", "call"],
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
)
KV_CACHE_USED = Gauge("quartet_kv_cache_used_ratio", "Part of the KV cache that requests hold, 0 to 1", ["stage"])
STREAM_BYTES = Counter(
    "quartet_stream_bytes_total",
    "Tensor payload sent to consumers; `rows` is their kind, `consumer` a stage or other, `transport` inline, "
    "shared_memory or ucx",
    ["stage", "consumer", "rows", "transport"],
)
STREAM_CHUNK_SECONDS = Histogram(
    "quartet_stream_chunk_seconds",
    "From when the oldest row of a chunk was made until the chunk was handed to the network: waits for credit, and "
    "gathering where the consumer asked for it, included",
    ["stage", "consumer", "transport"],
    buckets=_CHUNK_BUCKETS_S,
)
SHARED_MEMORY_SIZE = Gauge("quartet_shared_memory_size_bytes", "Size of the stage's arena; 0 without one", ["stage"])
SHARED_MEMORY_USED = Gauge("quartet_shared_memory_used_bytes", "What consumers are reading of the arena", ["stage"])
STREAM_FALLBACK_BYTES = Counter(
    "quartet_stream_fallback_bytes_total",
    "Payload large enough for `transport` that went inline, by reason: not_offered (the consumer does not read by it); "
    "shared_memory: full (the arena had no room), other_host, other_directory or other_user (it does not see the "
    "arena); ucx: connecting, unreachable",
    ["stage", "transport", "reason"],
)
STREAM_PENDING = Gauge(
    "quartet_stream_positions_pending", "Positions that wait for their consumers' credit, of all streams", ["stage"]
)
STREAM_CREDITS = Gauge(
    "quartet_stream_credits_outstanding", "Chunks that consumers have granted and not got, of all streams", ["stage"]
)
TLS_EXPIRES = Gauge(
    "quartet_tls_certificate_expires_seconds", "Unix time at which this process's certificate expires; 0 without TLS"
)


def serve_operations(host: str, port: int, health: Health) -> int:
    """Serves until the process ends; called on the event loop that `health` runs on. Returns the port.

    Args:
        host: address to listen on.
        port: 0 takes a free one.
        health: gives the state of "/health" or "/ready", e.g. "SERVING".

    Raises:
        OSError: the port is taken.
    """
    server, _ = start_http_server(port, host)
    server.set_app(_application(health, asyncio.get_running_loop()))  # pyright: ignore[reportArgumentType]
    handler: Any = server.RequestHandlerClass
    handler.timeout = SILENCE_S
    return server.server_port


def _application(health: Health, loop: asyncio.AbstractEventLoop) -> WSGIApplication:
    page = MetricsPage(generate_latest, KEPT_S)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path not in ("/health", "/ready"):
            start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
            return [page.read()]
        answer = asyncio.run_coroutine_threadsafe(health(path), loop)
        try:
            found = answer.result(PATIENCE_S)
        except TimeoutError:
            answer.cancel()
            found = f"the event loop has not answered for {PATIENCE_S:g} s"
        status = "200 OK" if found == "SERVING" else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{found}\n".encode()]

    return answer
