"""What a process says is JSON, one object a line, whoever said it."""

import json
import subprocess
import sys

import pytest

from tests.support.network import certificates

SPEAKER = """
import logging, threading, warnings
import structlog
from services.common.telemetry import logs

stubborn = logging.getLogger("stubborn")  # a library with a format of its own
stubborn.addHandler(logging.StreamHandler())
stubborn.propagate = False
logs.configure("info", "a-stage")
logs.adopt("stubborn")
structlog.get_logger().info("ours")
stubborn.warning("a library's")
logging.getLogger("quiet").debug("not logged")
warnings.warn("a warning\\nof two lines")
thread = threading.Thread(target=lambda: structlog.get_logger().info("a thread's"))
thread.start()
thread.join()
structlog.get_logger().info("a rank's", stage="a-stage-1")
raise ValueError("its end")
"""

GRPC = """
import socket, ssl, sys
from concurrent import futures
import {package}
import grpc

key, certificate = open("{key}", "rb").read(), open("{certificate}", "rb").read()
server = grpc.server(futures.ThreadPoolExecutor(1))
port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
server.start()
with socket.create_connection(("127.0.0.1", port)) as client:  # one that speaks in the clear
    client.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    while client.recv(1024):
        pass
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
with socket.create_connection(("127.0.0.1", port)) as client:  # one that asks for a name that is not its own
    context.wrap_socket(client, server_hostname="elsewhere").close()
sys.stdin.read()
server.stop(None).wait()
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)


def test_all_of_a_process():
    lines = [json.loads(line) for line in run(SPEAKER).stderr.splitlines()]
    assert [(line["stage"], line["level"]) for line in lines] == [
        ("a-stage", "info"),
        ("a-stage", "warning"),
        ("a-stage", "warning"),
        ("a-stage", "info"),
        ("a-stage-1", "info"),
        ("a-stage", "critical"),
    ]
    assert "a warning\nof two lines" in lines[2]["event"]
    assert "ValueError: its end" in lines[-1]["exception"]


@pytest.mark.parametrize("package", ["services.common", "gateway"])
def test_grpcs_own_lines_are_left_out_unless_asked_for(package, tmp_path, monkeypatch):
    home = certificates.make(tmp_path, "talker") / "talker"
    code = GRPC.format(package=package, key=home / "tls.key", certificate=home / "tls.crt")
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    assert run(code).stderr == ""
    monkeypatch.setenv("GRPC_VERBOSITY", "INFO")
    # gRPC may write it after the connection has ended: until then the process stays
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as told:
        assert told.stdin
        assert told.stderr
        assert any("Handshake failed" in line for line in told.stderr)
        assert any("No match found for server name" in line for line in told.stderr)
        told.stdin.close()
        told.stderr.read()
