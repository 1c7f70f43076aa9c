"""A stage's plain-HTTP port: /metrics for Prometheus, and /health and /ready for checks that shall cost nothing.

/health and /ready are gRPC's own health of "" and of the stage's service, for what cannot ask by gRPC or has no
certificate: a shell in the container, a kubelet where TLS is on. 200: SERVING; 503: not, with the reason. Threads serve
the port, but the answer is made on the event loop that serves the requests: where that hangs, the stage is not ready.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import start_http_server

# Shorter than the timeouts of health checks (deploy/), so that the reason is told.
PATIENCE_S = 4.0

Health = Callable[[str], Coroutine[Any, Any, str]]


def serve_operations(host: str, port: int, health: Health) -> int:
    """Serves until the process ends; called on the event loop that `health` runs on.

    Args:
        host: address to listen on.
        port: 0 takes a free one.
        health: gives the state of "/health" or "/ready", e.g. "SERVING".

    Returns:
        The port.

    Raises:
        OSError: the port is taken.
    """
    server, _ = start_http_server(port, host)
    server.set_app(_application(server.get_app(), health, asyncio.get_running_loop()))  # pyright: ignore[reportArgumentType]
    return server.server_port


def _application(metrics: WSGIApplication, health: Health, loop: asyncio.AbstractEventLoop) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path not in ("/health", "/ready"):
            return metrics(environ, start_response)
        asked = asyncio.run_coroutine_threadsafe(health(path), loop)
        try:
            found = asked.result(PATIENCE_S)
        except TimeoutError:
            asked.cancel()
            found = f"the event loop has not answered for {PATIENCE_S:g} s"
        status = "200 OK" if found == "SERVING" else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{found}\n".encode()]

    return answer
