"""Checks the profiles of docker-compose.yaml, for scripts/test_compose.py."""

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
    """Checks an image of the small model, beside speech."""
    system.profiles.append("dit")
    system.settings["QUARTET_PIPELINE"] = "./deploy/docker/pipelines/pipeline-dit.yaml"
    system.compose("build", "--quiet", "dit")
    system.compose("up", "-d", "--wait")
    image = json.loads(docker("image", "inspect", system.image("dit")))[0]
    yield f"image: {image['Size'] / 1e6:.0f} MB"
    client = system.client()
    models = [model.id for model in client.models.list().data]
    begin = time.monotonic()
    model, prompt = "quartet-demo-painter", "a yellow cross on a blue ground"
    how = {"num_inference_steps": 8, "seed": 0}
    [result] = client.images.generate(model=model, prompt=prompt, extra_body=how).data or []
    assert result.b64_json
    image = Image.open(io.BytesIO(base64.b64decode(result.b64_json))).convert("RGB")
    assert image.size == (128, 128), image.size
    yellow, blue = (_share(image, colour) for colour in ((240, 210, 30), (31, 80, 200)))
    assert 0.02 < yellow < 0.6, f"{yellow:.0%} is yellow"
    assert blue > 0.3, f"{blue:.0%} is blue"
    yield f"{', '.join(models)}: {prompt}, {image.size}, in {time.monotonic() - begin:.1f} s"
    question, expected = next(iter(system.expected.items()))
    speak(client, question).check(expected)


def _share(image: Image.Image, colour: tuple[int, int, int]) -> float:
    """Share of the image's pixels that are near to `colour`."""
    pixels = list(zip(*(band.tobytes() for band in image.split()), strict=True))
    return sum(max(abs(a - b) for a, b in zip(pixel, colour, strict=True)) < 60 for pixel in pixels) / len(pixels)


def prometheus(system: System) -> Iterator[str]:
    """Checks Prometheus of the monitoring profile: it finds every replica, and loads the rules."""
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
