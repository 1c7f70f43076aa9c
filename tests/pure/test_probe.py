"""The health command of the images against real servers."""

import http.server
import threading
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.rpc.probe import main

SERVICE = "quartet.v1.TalkerService"
PATIENT = ("--timeout", "60")


@pytest.fixture
def stage():
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    servicer.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address, servicer
    server.stop(0)


def test_liveness_and_readiness(stage, capsys):
    address, servicer = stage
    assert main([*PATIENT, "--address", address]) == 0
    assert main([*PATIENT, "--address", address, "--service", SERVICE]) == 1
    assert capsys.readouterr().err == f"{address}: NOT_SERVING\n"
    servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    assert main([*PATIENT, "--address", address, "--service", SERVICE]) == 0


def test_unknown_service(stage, capsys):
    address, _ = stage
    assert main([*PATIENT, "--address", address, "--service", "quartet.v1.Nobody"]) == 1
    assert "NOT_FOUND" in capsys.readouterr().err


def test_nobody_listens(capsys):
    assert main(["--address", "127.0.0.1:1", "--timeout", "1"]) == 1
    assert "127.0.0.1:1: " in capsys.readouterr().err
    assert main(["--url", "http://127.0.0.1:1/ready"]) == 1


def test_gateway():
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/ready" else 503)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    assert main([*PATIENT, "--url", f"{url}/ready"]) == 0
    assert main([*PATIENT, "--url", f"{url}/other"]) == 1
    server.shutdown()
