"""Every family through HTTP: what a client gets is what diffusers' own pipeline makes, alone and among others."""

import base64
import io
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import httpx
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from tests.support.families import SLOW, SYSTEMS
from tests.support.stage.dit_engine import fresh

pytestmark = pytest.mark.e2e

TOLERANCE = 1e-4  # before encoding
SIDE, STEPS, FRAMES, SECONDS = 64, 3, 5, 0.2
GUIDANCE = {"qwen-image": "true_cfg_scale", "qwen-image-edit": "true_cfg_scale"}
ASKS = (("a red fox", 1, 2.5), ("a much longer prompt: a blue house by the sea, at night", 2, 1.5), ("x", 3, 2.0))
PICTURE = Image.linear_gradient("L").resize((SIDE, SIDE)).convert("RGB")


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def wanted(pipeline: Any, family: str, prompt: str, seed: int, guidance: float) -> np.ndarray:
    """diffusers' answer: floats."""
    arguments: dict[str, Any] = {
        "prompt": prompt,
        "num_inference_steps": STEPS,
        GUIDANCE.get(family, "guidance_scale"): guidance,
        "generator": torch.Generator("cpu").manual_seed(seed),
    }
    if family in GUIDANCE:
        arguments["negative_prompt"] = " "
    if family in ("qwen-image-edit", "wan-i2v"):
        arguments["image"] = PICTURE
    if family == "stable-audio":
        pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
        return pipeline(**arguments, audio_end_in_s=SECONDS, output_type="pt").audios[0].T.numpy().clip(-1, 1)
    arguments |= {"width": SIDE, "height": SIDE, "output_type": "np"}
    if family in ("wan", "wan-i2v"):
        return pipeline(**arguments, num_frames=FRAMES).frames[0]
    return pipeline(**arguments).images[0]


def ask(url: str, family: str, prompt: str, seed: int, guidance: float) -> np.ndarray:
    """Quartet's answer, decoded."""
    fields: dict[str, Any] = {
        "prompt": prompt,
        "seed": seed,
        "guidance_scale": guidance,
        "num_inference_steps": STEPS,
    }
    with httpx.Client(base_url=url, timeout=120) as client:
        if family == "stable-audio":
            response = client.post("/v1/audio/generations", json=fields | {"seconds": SECONDS}).raise_for_status()
            samples, rate_hz = soundfile.read(io.BytesIO(response.content), dtype="int16", always_2d=True)
            assert rate_hz == 44_100
            return samples
        fields["size"] = f"{SIDE}x{SIDE}"
        if family in ("wan", "wan-i2v"):
            return film(client, fields | {"num_frames": FRAMES}, family == "wan-i2v")
        if family == "qwen-image-edit":
            response = client.post(
                "/v1/images/edits", data=fields, files={"image": ("a.png", png(PICTURE), "image/png")}
            )
        else:
            response = client.post("/v1/images/generations", json=fields)
        (answer,) = response.raise_for_status().json()["data"]
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["b64_json"]))))


def film(client: httpx.Client, fields: dict[str, Any], from_picture: bool) -> np.ndarray:
    files = {"input_reference": ("a.png", png(PICTURE), "image/png")} if from_picture else None
    data = {"data": fields, "files": files} if files else {"json": fields}
    job = client.post("/v1/videos", **data).raise_for_status().json()  # type: ignore[arg-type]
    while job["status"] in ("queued", "in_progress"):
        time.sleep(0.1)
        job = client.get(f"/v1/videos/{job['id']}").json()
    assert job["status"] == "completed", job
    content = client.get(f"/v1/videos/{job['id']}/content").raise_for_status().content
    with av.open(io.BytesIO(content)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])  # pyright: ignore[reportAttributeAccessIssue]


def compare(family: str, mine: np.ndarray, theirs: np.ndarray) -> None:
    assert mine.shape == theirs.shape
    if family == "stable-audio":
        assert np.abs(mine / 32768 - theirs).max() <= TOLERANCE + 1 / 32768
    elif family in ("wan", "wan-i2v"):  # H.264 loses some: tests/parity compares the frames before it
        signal_to_noise_db = -10 * np.log10(np.mean((mine / 255 - theirs) ** 2))
        assert signal_to_noise_db > 20  # what noise in every pixel and colour leaves
    else:
        assert np.abs(mine - theirs * 255).max() <= 0.5 + 255 * TOLERANCE


@pytest.mark.parametrize("family", SYSTEMS)
def test_through_http(dit_systems, family: str) -> None:
    url = dit_systems.get(family).url
    pipeline = fresh(dit_systems.checkpoint(family))
    pipeline.set_progress_bar_config(disable=True)
    asks = ASKS[:2] if family in SLOW else ASKS
    answers = [wanted(pipeline, family, *asked) for asked in asks]
    assert np.mean((answers[0] - answers[1]) ** 2) > 1e-4
    compare(family, ask(url, family, *ASKS[0]), answers[0])
    with ThreadPoolExecutor(len(asks)) as pool:
        together = list(pool.map(lambda asked: ask(url, family, *asked), asks))
    for mine, theirs in zip(together, answers, strict=True):
        compare(family, mine, theirs)
    dit_systems.stop(family)  # nobody asks it after this
