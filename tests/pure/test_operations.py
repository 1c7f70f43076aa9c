"""A stage's plain-HTTP port, asked by the images' own health command: without a Python, without a certificate."""

import asyncio
import http.server
import threading
import time

import httpx
import pytest

from services.common.telemetry import metrics
from tests.support.deployment.health_command import healthy


@pytest.fixture
async def port(monkeypatch):
    monkeypatch.setattr(metrics, "PATIENCE_S", 60)
    states = {"/health": "SERVING", "/ready": "NOT_SERVING"}

    async def health(path: str) -> str:
        return states[path]

    return metrics.serve_operations("127.0.0.1", 0, health)


async def test_liveness_readiness_and_metrics_have_a_path_each(port: int):
    assert await asyncio.to_thread(healthy, port, "/health") == (0, "")
    assert await asyncio.to_thread(healthy, port, "/ready") == (1, "/ready: 503 NOT_SERVING")
    assert await asyncio.to_thread(healthy, port, "/metrics") == (0, "")


async def test_a_page_of_metrics_is_made_anew_four_times_a_second_at_most(port: int):
    begun, pages = time.monotonic(), set()
    async with httpx.AsyncClient(verify=False) as client:
        for _ in range(20):
            pages.add((await client.get(f"http://127.0.0.1:{port}/metrics")).text)  # each tells the time of the process
    assert 1 <= len(pages) <= 2 + (time.monotonic() - begun) / metrics.KEPT_S


async def test_an_event_loop_that_hangs_is_not_healthy(port: int, monkeypatch):
    monkeypatch.setattr(metrics, "PATIENCE_S", 0.05)
    # not awaited: the loop stands still until the command has ended
    assert healthy(port, "/health") == (1, "/health: 503 the event loop has not answered for 0.05 s")
    monkeypatch.setattr(metrics, "PATIENCE_S", 60)
    assert await asyncio.to_thread(healthy, port, "/health") == (0, "")


def test_nobody_listens():
    assert healthy(1, "/health")[0] == 1


@pytest.mark.parametrize(("status", "said"), [(200, (0, "")), (503, (1, '/ready: 503 {"status":"not ready"}'))])
def test_a_gateways_answer(status: int, said: tuple[int, str]):
    class Answer(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b'{"status":"not ready"}')

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert healthy(server.server_port, "/ready") == said
