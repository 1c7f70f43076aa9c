"""Checks API keys and TLS between the containers, as in docs/security.md, for scripts/test_compose.py."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from compose_load import speak
from compose_system import STAGES, System, docker
from grpc_health.v1 import health_pb2, health_pb2_grpc

FILES = ("docker-compose.yaml", "deploy/docker/keys.yaml", "deploy/docker/tls.yaml")


def refuses_to_be_public(system: System) -> Iterator[str]:
    """Checks that a gateway without keys does not start if it is published."""
    system.settings["QUARTET_BIND"] = "0.0.0.0"
    try:
        ended = system.refused("up", "-d", "--no-deps", "--wait", "gateway")
        assert f"{system.project}-gateway-1 is unhealthy" in ended, ended
        said = docker("logs", system.containers("gateway")[0]["Id"], errors=True)
    finally:
        system.compose("rm", "--stop", "--force", "gateway")
        del system.settings["QUARTET_BIND"]
    why = re.search(r"without API keys the gateway is for this machine alone.*QUARTET_BIND=127.0.0.1", said)
    assert why, said
    yield why[0]


def keys_and_tls(system: System) -> Iterator[str]:
    """Turns both on in the running system."""
    image, settings = system.image("gateway"), system.settings
    with _directory(image) as directory:
        _run(image, directory, "python -m cli.main tls /out/tls; chown -R 10001 /out/tls; mkdir /out/keys")
        _run(image, directory, "echo keys: > /out/keys/keys.yaml")
        unlimited, limited = (_make_key(image, directory, flags) for flags in ("alice", "bob --requests-per-minute 1"))
        system.settings = settings | {
            "COMPOSE_FILE": ":".join(FILES),
            "QUARTET_KEYS_DIR": f"{directory}/keys",
            "QUARTET_TLS_DIR": f"{directory}/tls",
        }
        try:
            system.compose("up", "-d", "--wait")
            yield from _check_keys(system, unlimited, limited)
            yield from _check_tls(system)
            system.compose("down", "--timeout", "75")
        finally:
            system.settings = settings


@contextmanager
def _directory(image: str) -> Iterator[Path]:
    """Makes a directory that the containers' user may read, and removes it by a container."""
    with tempfile.TemporaryDirectory(prefix="quartet-test-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        try:
            yield directory
        finally:
            _run(image, directory, "rm -rf /out/*")


def _run(image: str, directory: Path, command: str) -> str:
    """Returns the output of `command`, run by root in a container that has `directory` as /out."""
    at = ("--network", "none", "--user", "0", "--volume", f"{directory}:/out")
    return docker("run", "--rm", *at, image, "sh", "-ec", command)


def _make_key(image: str, directory: Path, flags: str) -> str:
    """Adds a key to the file of keys, and returns it."""
    said = _run(image, directory, f"python -m cli.main key {flags} 2>&1 >> /out/keys/keys.yaml")
    key = re.search(r"sk-quartet-\S+", said)
    assert key, said
    return key[0]


def _check_keys(system: System, unlimited: str, limited: str) -> Iterator[str]:
    question, expected = next(iter(system.expected.items()))
    for wrong in ("none", unlimited[:-1]):
        with pytest.raises(openai.AuthenticationError) as refused:
            speak(system.client(wrong), question)
        assert refused.value.code == "invalid_api_key"
    yield f"401: {refused.value.message[:100]}"
    for key in (unlimited, limited, unlimited):
        speak(system.client(key), question).check(expected)
    with pytest.raises(openai.RateLimitError) as refused:
        speak(system.client(limited), question)
    assert 0 < int(refused.value.response.headers["retry-after"]) <= 60
    yield f"429: {refused.value.message[:100]}"
    for path in ("health", "ready", "metrics"):
        assert httpx.get(f"{system.url}/{path}", timeout=5).status_code == 200, path


def _check_tls(system: System) -> Iterator[str]:
    (gateway,) = system.containers("gateway")
    for stage, (port, service) in STAGES.items():
        (container,) = system.containers(stage)
        with (
            grpc.insecure_channel(f"{system.address(container)}:{port}") as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=5)  # pyright: ignore[reportAttributeAccessIssue]
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        at = f"python -m services.common.rpc.probe --address {stage}:{port} --service {service} --tls-server-name"
        said = docker("exec", gateway["Id"], "sh", "-c", f"{at} {stage} 2>&1; echo $?; {at} other 2>&1; echo $?")
        by_name, *_, by_another = said.splitlines()
        assert (by_name, by_another) == ("0", "1"), said
    yield "stages refuse connections in the clear, and have certificates of their names"
