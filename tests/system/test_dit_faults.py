"""A real dit behind a real gateway: what is refused, and what goes on when something is killed."""

import asyncio
import io
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from PIL import Image

from gateway.pipelines import SHIPPED
from tests.support.systems.stack import Stack, running, until, wait_until_ready

pytestmark = pytest.mark.e2e


# a minute or more, unless it is given up
SLOW = {"prompt": "a red fox", "num_inference_steps": 200, "size": "512x512"}


def png(size: tuple[int, int] = (64, 64), mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def painter(dit_systems) -> Stack:
    return dit_systems.get("sd3")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"size": "65x64"}, "size"),
        ({"size": "0x64"}, "size"),
        ({"size": "9000x9000"}, "size"),
        ({"size": "huge"}, "size"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"lora": "ink"}, "lora"),
        ({"prompt": "fox " * 3000}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"n": 11}, "n"),
        ({"seed": -1}, "seed"),
        ({"model": "other"}, "model"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_bad_requests_name_the_field(painter: Stack, fields: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{painter.url}/v1/images/generations", json={"prompt": "a red fox", **fields}, timeout=60)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ({"image": b"not a picture"}, "image"),
        ({"image": png()[:70]}, "image"),
        ({"image": png((20_000, 20_000), "1")}, "image"),
        ({"image": png(), "mask": png((32, 32))}, "mask"),
        ({"mask": png()}, "image"),
    ],
)
def test_bad_uploads_name_the_file(painter: Stack, files: dict[str, bytes], param: str) -> None:
    uploads = {name: (f"{name}.png", data, "image/png") for name, data in files.items()}
    fields = {"prompt": "a red fox", "num_inference_steps": 4}
    answer = httpx.post(f"{painter.url}/v1/images/edits", data=fields, files=uploads, timeout=60)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["param"] == param


async def test_a_client_that_leaves_frees_the_dit(painter: Stack) -> None:
    cancelled = painter.cancelled("dit")
    async with httpx.AsyncClient(base_url=painter.url, timeout=60) as client:
        asked = asyncio.create_task(client.post("/v1/images/generations", json=SLOW))
        while not painter.in_flight()["dit"]:
            await asyncio.sleep(0.02)
        asked.cancel()
    until(lambda: not painter.in_flight()["dit"], "the dit still works on it")
    until(lambda: painter.cancelled("dit") == cancelled + 1, "it was given up, which a stage counts last")


@pytest.mark.long
def test_a_dit_that_is_killed_fails_its_requests_and_comes_back(painter: Stack) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(painter.http.post, "/v1/images/generations", json=SLOW)
        until(lambda: painter.in_flight()["dit"], "the dit works on it")
        os.kill(painter.pid("dit"), signal.SIGKILL)
        answer = asked.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "stage_unavailable"
    wait_until_ready(painter)
    quick = {"prompt": "a red fox", "num_inference_steps": 2, "size": "64x64"}
    assert httpx.post(f"{painter.url}/v1/images/generations", json=quick, timeout=60).status_code == 200


@pytest.mark.long
def test_a_video_job_outlives_the_gateway(dit_systems) -> None:
    system = dit_systems.get("wan")
    job = system.http.post("/v1/videos", json=SLOW).json()
    until(lambda: system.http.get(f"/v1/videos/{job['id']}").json()["status"] == "in_progress", "it begins")
    os.kill(system.pid("gateway"), signal.SIGKILL)
    wait_until_ready(system)

    def listed() -> dict:
        return {each["id"]: each for each in system.http.get("/v1/videos").json()["data"]}[job["id"]]

    until(lambda: listed()["status"] == "failed", "the killed gateway's lease is over")
    assert listed()["error"]["code"] == "interrupted"
    until(lambda: not system.in_flight()["dit"], "nobody wants it any more")


@pytest.mark.weekly
def test_a_dit_with_an_encoder(dit_systems, tmp_path_factory: pytest.TempPathFactory) -> None:
    """GLM-Image in two processes, from the shipped pipeline file."""
    directory = tmp_path_factory.mktemp("run")
    fields = {"prompt": "a red fox", "seed": 3, "num_inference_steps": 3, "size": "64x64"}
    flags = [f"--gateway-arg=--jobs-dir={directory / 'jobs'}", "--pipeline", str(SHIPPED / "glm-image.yaml")]
    with running(dit_systems.checkpoint("glm-image"), directory, *flags) as system:
        answers = [
            each.http.post("/v1/images/generations", json=fields).raise_for_status().json()["data"]
            for each in (dit_systems.get("glm-image"), system)
        ]
        long = fields | {"prompt": "fox " * 5000}
        refused = system.http.post("/v1/images/generations", json=long)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert answers[0] == answers[1]
