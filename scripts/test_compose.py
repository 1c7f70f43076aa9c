"""What a user does with docker compose, done and checked: `make test-compose`, or `python scripts/test_compose.py`.

Builds the images, has starts fail, starts the system, talks to it, looks at its containers, scales, kills and
replaces stages under load, drains all, turns keys and TLS on, adds the dit and Prometheus, takes it all down. Needs
docker with compose 2.20 or newer. Where there is no image of Prometheus, PROMETHEUS_IMAGE names another, or
--no-prometheus leaves it out; --no-replicas leaves out what needs several replicas of a stage, --no-dit the dit with
its image. --keep leaves the system running at the end, or where it failed.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import openai
from compose_alone import alone
from compose_failures import failed_starts
from compose_health import health_checks
from compose_load import ALOUD, QUESTIONS, Load, speak
from compose_profiles import dit, prometheus
from compose_security import keys_and_tls, refuses_to_be_public
from compose_system import STAGES, System, docker, free_port
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

GATEWAY_BYTES = 300e6
TYPED_WITHIN_S = 1.0
RESTART_S = 180
QUESTION, ANSWER = next(iter(QUESTIONS.items()))
LONG = 800  # tokens and frames of an answer that is made to go on, 64 s of speech; three of them end within a drain
SPANS = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
SECRETS = ("HF_TOKEN", "API_KEY", "PASSWORD")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--no-replicas", action="store_true", help="leave out what needs several replicas of a stage")
    parser.add_argument("--no-dit", action="store_true", help="leave out the dit, and making its image")
    parser.add_argument("--no-prometheus", action="store_true", help="leave out Prometheus")
    parser.add_argument("--keep", action="store_true", help="leave the system running")
    flags = parser.parse_args()
    left_out = {step for option, steps in OPTIONAL.items() if getattr(flags, option) for step in steps}
    system = System(f"quartet-test-{os.getpid()}", free_port())
    try:
        for name, step in STEPS.items():
            if step in left_out:
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
        docker("run", "--rm", "--network", "none", system.image(service), "python", "-c", f"import {SPANS}")
    find = "import importlib.util as u; print([n for n in ('torch', 'vllm', 'transformers') if u.find_spec(n)])"
    found = docker("run", "--rm", "--network", "none", system.image("gateway"), "python", "-c", find)
    assert found == "[]", f"the gateway's image has {found}"


def start(system: System) -> Iterator[str]:
    begin = time.monotonic()
    system.compose("up", "-d", "--wait")
    yield f"ready after {time.monotonic() - begin:.0f} s"


def chat(system: System) -> Iterator[str]:
    """Records the answers without load, which are expected under load."""
    for question, words in QUESTIONS.items():
        answer = speak(system.client(), question)
        assert answer.text == words, f"{question} {answer.text}"
        speak(system.client(), question).check(answer)
        system.expected[question] = answer
        yield f"{question} {answer.text} {answer.audio_s:.2f} s of speech"
    answer = speak(system.client(), ALOUD)
    assert answer.text == ANSWER, f"{ALOUD.name}: {answer.text}"
    yield f"{ALOUD.name}: {answer.text}"


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
    for stage in STAGES:
        (container,) = system.containers(stage)
        yield f"{stage}: {', '.join(_described(system, stage, container, health_pb2.HealthCheckResponse.SERVING))}"


def _described(system: System, stage: str, container: dict[str, Any], readiness: int) -> list[str]:
    """Returns the services that reflection lists and describes, after checking their health."""
    port, service = STAGES[stage]
    with grpc.insecure_channel(f"{system.address(container)}:{port}") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = sorted(database.get_services())
        assert service in services, f"{stage}: {services}"
        for each in services:
            assert database.FindFileContainingSymbol(each).service, each
        check = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
        for name, expected in (("", health_pb2.HealthCheckResponse.SERVING), (service, readiness)):
            answer = check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == expected, f"{stage} {name!r}: {answer.status}"
    return services


def two_talkers(system: System) -> Iterator[str]:
    system.scale("talker", 2)
    time.sleep(5)  # a new replica takes traffic within 5 seconds
    before = [system.finished(each) for each in system.containers("talker")]
    with Load(system.client, system.expected) as load:
        load.wait_for(32)
    load.check()
    counts = [system.finished(each) - was for each, was in zip(system.containers("talker"), before, strict=True)]
    assert min(counts) > 0, f"one talker got nothing: {counts}"
    yield f"{load.answered} answers, by talker {counts}"


def scale_and_replace(system: System) -> Iterator[str]:
    with Load(system.client, system.expected) as load:
        load.wait_for(8)
        system.scale("talker", 3)
        time.sleep(5)  # a new replica takes traffic within 5 seconds
        load.wait_for(8)
        system.scale("talker", 1)
        load.wait_for(8)
        for stage in STAGES:
            system.replace(stage)
            load.wait_for(8)
    load.check()
    yield f"{load.answered} answers, none failed"


def replace_gateway(system: System) -> Iterator[str]:
    """Replaces the gateway: a host's port is one container's, so clients retry in between."""
    with Load(lambda: system.client(max_retries=20), system.expected) as load:
        load.wait_for(8)
        begin = time.monotonic()
        system.compose("up", "-d", "--force-recreate", "--no-deps", "--wait", "gateway")
        took = time.monotonic() - begin
        load.wait_for(16)
    load.check()
    yield f"{load.answered} answers, none failed; replaced in {took:.0f} s"


def crash(system: System) -> Iterator[str]:
    expected = {QUESTION: speak(system.client(), QUESTION, 200)}
    for stage in STAGES:
        (container,) = system.containers(stage)
        with Load(system.client, expected, clients=4, length=200) as load:
            load.wait_for(4)
            while system.running(container) < 2:
                assert not load.failures, repr(load.failures[0][2])
                time.sleep(0.01)
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
        speak(system.client(), QUESTION, 200).check(expected[QUESTION])
        yield f"{stage}: {str(load.failures[0][2])[:110]}"
        longest_ms = max(in_flight) * 1000
        yield f"{stage}: {len(in_flight)} requests failed within {longest_ms:.0f} ms; back after {waited:.0f} s"


def drain(system: System) -> Iterator[str]:
    """Sends SIGTERM to all in the middle of answers, which must end in full."""
    containers = [system.containers(service)[0] for service in ("gateway", *STAGES)]
    expected = speak(system.client(), QUESTION, LONG)
    speaking = [threading.Event() for _ in range(3)]  # one may end before every stage was asked
    with ThreadPoolExecutor(10) as threads:
        ask = (speak, system.client(), QUESTION, LONG)
        answers = [threads.submit(*ask, each.set) for each in speaking]
        assert all(each.wait(30) for each in speaking), "no speech within 30 s"
        stops = [threads.submit(docker, "stop", container["Id"]) for container in containers]
        leaving = [threads.submit(_leaving, system, *each) for each in zip(STAGES, containers[1:], strict=True)]
        for each in leaving:
            yield each.result()
        assert not all(answer.done() for answer in answers), "the answers ended too early to tell"
        for answer in answers:
            answer.result().check(expected)
        for stop in stops:
            stop.result()
    for container in containers:
        code = json.loads(docker("inspect", container["Id"]))[0]["State"]["ExitCode"]
        assert code == 0, f"{container['Name']} ended with status {code}"
    yield f"{len(answers)} answers of {expected.audio_s:.0f} s came to their end; every container ended with status 0"


def _leaving(system: System, stage: str, container: dict[str, Any]) -> str:
    """Returns the health command's output once the stage has begun to drain."""
    while not (said := system.probe(container, STAGES[stage][1]))[0]:
        pass
    assert said[0] == 1, said
    assert "NOT_SERVING" in said[1], said
    _described(system, stage, container, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert system.probe(container) == (0, "")
    return f"{stage}: {said[1]}; alive, and described by reflection"


STEPS = {
    "build": build,
    "failed starts": failed_starts,
    "up": start,
    "chat with speech": chat,
    "containers": containers,
    "reflection and health": reflection,
    "each stage alone": alone,
    "health checks": health_checks,
    "two talkers": two_talkers,
    "scale and replace under load": scale_and_replace,
    "gateway replaced under load": replace_gateway,
    "crash": crash,
    "drain": drain,
    "public without keys": refuses_to_be_public,
    "keys and TLS": keys_and_tls,
    "dit": dit,
    "prometheus": prometheus,
}
OPTIONAL = {"no_replicas": (two_talkers, scale_and_replace), "no_dit": (dit,), "no_prometheus": (prometheus,)}

if __name__ == "__main__":
    sys.exit(main())
