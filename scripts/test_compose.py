"""What a user does with docker compose, done and checked: `make test-compose`, or `python scripts/test_compose.py`.

Builds the images, starts the cpu profile, talks to it, looks at its containers, scales, kills and replaces stages
under load, takes it all down. Needs docker with compose 2.20 or newer. --no-replicas leaves out what needs several
replicas of a stage; --keep leaves the system running at the end, or where it failed.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Iterator

import grpc
import openai
from compose_system import STAGES, Load, System, docker, speak
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

GATEWAY_BYTES = 300e6
TYPED_WITHIN_S = 1.0
RESTART_S = 180
SECRETS = ("HF_TOKEN", "API_KEY", "PASSWORD")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--no-replicas", action="store_true", help="leave out what needs several replicas of a stage")
    parser.add_argument("--keep", action="store_true", help="leave the system running")
    flags = parser.parse_args()
    system = System(f"quartet-test-{os.getpid()}", free_port())
    try:
        for name, step in STEPS.items():
            if flags.no_replicas and step in NEED_REPLICAS:
                print(f"--- {name}: left out", flush=True)
                continue
            begin = time.monotonic()
            print(f"--- {name}", flush=True)
            for line in step(system):
                print("   ", line, flush=True)
            print(f"    ok, {time.monotonic() - begin:.0f} s", flush=True)
    except BaseException:
        system.compose("ps", "-a")
        system.compose("logs", "--tail", "20")
        raise
    finally:
        if not flags.keep:
            system.compose("down", "--volumes", "--remove-orphans", "--timeout", "75")
            assert not system.leftovers(), f"left behind: {system.leftovers()}"
            print("--- down: nothing is left")


def build(system: System) -> Iterator[str]:
    system.compose("build", "--quiet")
    for service in ("gateway", *STAGES):
        image = json.loads(docker("image", "inspect", system.image(service)))[0]
        yield f"{service}: {image['Size'] / 1e6:.0f} MB"
        if service == "gateway":
            assert image["Size"] < GATEWAY_BYTES, "the gateway's image is to be under 300 MB"
        named = [entry for entry in image["Config"]["Env"] if any(secret in entry for secret in SECRETS)]
        assert not named, f"{service}: secrets in the image's environment: {named}"
    find = "import importlib.util as u; print([n for n in ('torch', 'vllm', 'transformers') if u.find_spec(n)])"
    found = docker("run", "--rm", "--network", "none", system.image("gateway"), "python", "-c", find)
    assert found == "[]", f"the gateway's image has {found}"


def start(system: System) -> Iterator[str]:
    begin = time.monotonic()
    system.compose("up", "-d", "--wait")
    yield f"ready after {time.monotonic() - begin:.0f} s"


def chat(system: System) -> Iterator[str]:
    text, pcm = speak(system.client(), "Say something kind.")
    assert text
    assert len(pcm) > 1920, f"{len(pcm)} bytes of speech"
    yield f"{len(text)} characters, {len(pcm) / 2 / 24000:.2f} s of speech"


def containers(system: System) -> Iterator[str]:
    for service in ("gateway", *STAGES):
        (container,) = system.containers(service)
        host, name = container["HostConfig"], container["Name"]
        assert container["Config"]["User"] == "10001:10001", name
        assert host["ReadonlyRootfs"], name
        assert host["CapDrop"] == ["ALL"], name
        assert "no-new-privileges:true" in host["SecurityOpt"], name
        assert host["Memory"] > 0, f"{name}: no memory limit"
        assert container["Config"]["StopTimeout"] > 60, f"{name}: stopped before its drain of 60 s ends"
        assert host["RestartPolicy"]["Name"] == "unless-stopped", name
        published = [port for port, at in container["NetworkSettings"]["Ports"].items() if at]
        assert published == (["8000/tcp"] if service == "gateway" else []), f"{name}: {published}"
        identity = docker("exec", container["Id"], "python", "-c", "import os; print(os.getuid(), os.getgid())")
        assert identity == "10001 10001", name
        written = docker("exec", container["Id"], "sh", "-c", "touch /opt/quartet/x /etc/x 2>&1; echo", check=False)
        assert written.count("Read-only") == 2, f"{name}: {written}"
    yield "no root, read-only, no capabilities, limits, one published port"


def reflection(system: System) -> Iterator[str]:
    for stage, (port, service) in STAGES.items():
        (container,) = system.containers(stage)
        with grpc.insecure_channel(f"{system.address(container)}:{port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            services = sorted(database.get_services())
            assert service in services, f"{stage}: {services}"
            for each in services:
                assert database.FindFileContainingSymbol(each).service, each
            check = health_pb2_grpc.HealthStub(channel).Check
            for asked in ("", service):
                answer = check(health_pb2.HealthCheckRequest(service=asked), timeout=5)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING, f"{stage} {asked!r}"
        yield f"{stage}: {', '.join(services)}"


def two_talkers(system: System) -> Iterator[str]:
    system.scale("talker", 2)
    time.sleep(5)  # a new replica takes traffic within 5 seconds
    before = [system.finished(each) for each in system.containers("talker")]
    with Load(system.client) as load:
        time.sleep(15)
    counts = [system.finished(each) - was for each, was in zip(system.containers("talker"), before, strict=True)]
    assert not load.failures, load.failures[0]
    assert min(counts) > 0, f"one talker got nothing: {counts}"
    yield f"{load.answered} answers, by talker {counts}"


def scale_and_replace(system: System) -> Iterator[str]:
    with Load(system.client) as load:
        time.sleep(3)
        system.scale("talker", 3)
        time.sleep(6)
        system.scale("talker", 1)
        time.sleep(3)
        for stage in STAGES:
            system.replace(stage)
            time.sleep(3)
    assert not load.failures, f"{len(load.failures)} of {load.answered + len(load.failures)} failed: {load.failures[0]}"
    yield f"{load.answered} answers, none failed"


def crash(system: System) -> Iterator[str]:
    for stage in STAGES:
        with Load(system.client, clients=4) as load:
            while load.answered < 4:
                assert not load.failures, load.failures[0]
                time.sleep(0.1)
            (container,) = system.containers(stage)
            killed = time.monotonic()
            system.kill(container)
            time.sleep(TYPED_WITHIN_S + 1)
        assert load.failures, f"{stage} was killed and no request noticed"
        for *_, error in load.failures:
            assert isinstance(error, openai.APIError), repr(error)
        in_flight = [end - killed for begin, end, _ in load.failures if begin < killed]
        assert in_flight, f"{stage}: no request was in flight"
        assert max(in_flight) < TYPED_WITHIN_S, f"{stage}: a request took {max(in_flight):.2f} s to fail"
        waited = system.wait_until_ready(RESTART_S)
        speak(system.client(), "Are you back?")
        yield f"{stage}: {str(load.failures[0][2])[:110]}"
        longest_ms = max(in_flight) * 1000
        yield f"{stage}: {len(in_flight)} requests failed within {longest_ms:.0f} ms; back after {waited:.0f} s"


def drain(system: System) -> Iterator[str]:
    (gateway,) = system.containers("gateway")
    begin = time.monotonic()
    docker("stop", gateway["Id"])
    code = json.loads(docker("inspect", gateway["Id"]))[0]["State"]["ExitCode"]
    took = time.monotonic() - begin
    assert code == 0, f"the gateway ended with status {code}"
    assert took < 30, f"SIGTERM did not reach it: {took:.0f} s"
    for stage in STAGES:
        (container,) = system.containers(stage)
        docker("stop", container["Id"])
        code = json.loads(docker("inspect", container["Id"]))[0]["State"]["ExitCode"]
        assert code == 0, f"{stage} ended with status {code}"
    yield "every container ends with status 0 on SIGTERM"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


STEPS = {
    "build": build,
    "up": start,
    "chat with speech": chat,
    "containers": containers,
    "reflection and health": reflection,
    "two talkers": two_talkers,
    "scale and replace under load": scale_and_replace,
    "crash": crash,
    "stop": drain,
}
NEED_REPLICAS = (two_talkers, scale_and_replace)

if __name__ == "__main__":
    sys.exit(main())
