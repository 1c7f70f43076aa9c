"""Commands as processes of their own; what they do is tested in this process by tests/pure."""

import asyncio
import json
import re
import subprocess
import sys
from concurrent import futures
from importlib.util import find_spec
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from cli.main import app
from gateway.access.api_keys import digest, read_key_file
from tests.support.systems import command
from tests.support.systems.gateway import running
from tests.support.systems.stack import free_port


async def test_quartet_key_and_the_commands_that_send_it(tmp_path: Path):
    flags = ("carol", "--max-concurrent-requests", "3")
    made = await asyncio.to_thread(command.quartet, "key", *flags, cwd=tmp_path)
    found = re.search(r"sk-quartet-[A-Za-z0-9_-]{43}", made.stderr)
    assert found
    key = found[0]
    assert key not in made.stdout
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n" + made.stdout)
    [read] = read_key_file(file)
    assert (read.name, read.sha256, read.max_concurrent_requests) == ("carol", digest(key), 3)

    async with running(api_keys_file=file) as gateway:
        ask = [sys.executable, "-m", "cli.main", "chat", "hi", "--url", gateway.url]
        for flags, environment, worked in (
            (["--api-key", key], {}, True),
            ([], {"QUARTET_API_KEY": key, "OPENAI_API_KEY": "sk-other"}, True),
            ([], {"OPENAI_API_KEY": key}, True),
            ([], {}, False),
        ):
            options = {"capture_output": True, "text": True, "env": environment, "check": False}
            done = await asyncio.to_thread(subprocess.run, [*ask, *flags], **options)
            assert (done.returncode == 0) is worked, done.stderr
            assert worked or "an API key is required" in done.stderr


def test_top_of_nothing_is_an_error(tmp_path: Path):
    done = command.quartet("top", "--once", "--url", f"http://127.0.0.1:{free_port()}", cwd=tmp_path)
    assert done.returncode == 1
    assert "does not answer" in done.stderr


@pytest.mark.skipif(find_spec("vllm") is None, reason="the thinker's engine is not installed")
def test_doctor_of_this_machine(tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = command.quartet("doctor", "--model", str(tiny_checkpoint), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "thinker, talker, code2wav can start here" in done.stdout

    told = json.loads(CliRunner().invoke(app, ["doctor", "--stage=talker", "--json"]).output)
    assert told["machine"]["packages"]["torch"]
    assert list(told["stages"]) == ["talker"]
    gone = CliRunner().invoke(app, ["doctor", "--model", str(tmp_path), "--stage=thinker"])
    assert gone.exit_code == 1
    assert f"will not start: --model {tmp_path}" in gone.output


@pytest.fixture
def stage():
    """Address of a stage that is alive."""
    server, servicer = grpc.server(futures.ThreadPoolExecutor(2)), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address
    server.stop(0)


def test_the_health_command(stage: str):
    command = [sys.executable, "-m", "services.common.rpc.probe"]
    assert subprocess.run([*command, "--address", stage, "--timeout=60"], check=False).returncode == 0
    neither = subprocess.run(command, capture_output=True, text=True, check=False)
    assert neither.returncode == 2
    assert "--address" in neither.stderr
