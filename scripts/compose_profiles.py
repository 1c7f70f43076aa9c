"""What the profiles of docker-compose.yaml add, for scripts/test_compose.py."""

import base64
import io
import json
import time
from collections.abc import Iterator

import httpx
from compose_load import speak
from compose_system import STAGES, System, docker, free_port
from PIL import Image

SCRAPED_WITHIN_S = 60


def dit(system: System) -> Iterator[str]:
    """Pictures of its small model, beside speech."""
    system.profiles.append("dit")
    system.settings["QUARTET_PIPELINE"] = "./deploy/docker/pipelines/pipeline-dit.yaml"
    system.compose("build", "--quiet", "dit")
    system.compose("up", "-d", "--wait")
    image = json.loads(docker("image", "inspect", system.image("dit")))[0]
    yield f"image: {image['Size'] / 1e6:.0f} MB"
    client = system.client()
    models = [model.id for model in client.models.list().data]
    begin = time.monotonic()
    [made] = client.images.generate(model="quartet-tiny-dit", prompt="a red square", size="64x64").data or []
    assert made.b64_json
    picture = Image.open(io.BytesIO(base64.b64decode(made.b64_json)))
    picture.load()
    assert picture.size == (64, 64), picture.size
    yield f"{', '.join(models)}: {picture.format} of {picture.size} in {time.monotonic() - begin:.1f} s"
    question, expected = next(iter(system.expected.items()))
    speak(client, question).check(expected)


def prometheus(system: System) -> Iterator[str]:
    """Prometheus alone of the monitoring profile: it finds every replica, and loads the rules."""
    port = free_port()
    system.profiles.append("monitoring")
    system.settings["PROMETHEUS_PORT"] = str(port)
    system.compose("up", "-d", "--wait", "prometheus")
    begin, expected = time.monotonic(), {"gateway", *STAGES, *(p for p in system.profiles if p == "dit")}
    while (states := _scraped(port)) != dict.fromkeys(expected, "up"):
        assert time.monotonic() - begin < SCRAPED_WITHIN_S, states
        time.sleep(0.5)
    groups = httpx.get(f"http://127.0.0.1:{port}/api/v1/rules", timeout=5).json()["data"]["groups"]
    wrong = [rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "err"]
    assert groups, "no rules"
    assert not wrong, wrong
    yield f"{', '.join(sorted(states))} are up; {sum(len(group['rules']) for group in groups)} rules"


def _scraped(port: int) -> dict[str, str]:
    """Health of each of Prometheus's jobs; none while it does not answer yet."""
    try:
        targets = httpx.get(f"http://127.0.0.1:{port}/api/v1/targets", timeout=5).json()["data"]["activeTargets"]
    except httpx.TransportError:
        return {}
    return {target["labels"]["job"]: target["health"] for target in targets}
