"""What docs/any-model.md says to type of diffusion models, typed."""

from pathlib import Path

import av
import httpx
import pytest
from PIL import Image

from tests.support.samples.media import mp4
from tests.support.systems.stack import free_port
from tests.support.systems.terminal import Terminal, lines
from tests.support.weights import unlisted
from tests.support.weights.checkpoints import diffusion_checkpoint
from tests.support.weights.modular import modular_checkpoint
from tests.support.weights.unlisted import unlisted_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.weekly]
PAGE = lines("docs/any-model.md")
SMALL = "--steps 2"  # a checkpoint of random weights takes as long for a step as one that knows something


def line_with(words: str) -> str:
    (found,) = (line for line in PAGE if words in line)
    return found


def terminal(folder: Path, port: int, **said: str) -> Terminal:
    url = f"http://127.0.0.1:{port}"
    ours = {
        "quartet image": f".venv/bin/quartet image --url {url} {SMALL}",
        "quartet video": f".venv/bin/quartet video --url {url} {SMALL}",
        "quartet chat": f".venv/bin/quartet chat --url {url} --max-tokens 8",
        "quartet up": f".venv/bin/quartet up --port {port}",
    }
    return Terminal(folder, said | ours, {})


def test_control_images(tmp_path: Path) -> None:
    typist = terminal(
        tmp_path,
        free_port(),
        **{
            "stabilityai/stable-diffusion-xl-base-1.0": str(unlisted_checkpoint(unlisted.stable_diffusion_xl)),
            "diffusers/controlnet-canny-sdxl-1.0": str(unlisted_checkpoint(unlisted.control_net_xl)),
        },
    )
    Image.radial_gradient("L").resize((64, 48)).convert("RGB").save(tmp_path / "edges.png")
    with typist.served(line_with("--controlnet="), "ready after"):
        assert typist.type(line_with("--control-image")).startswith("wrote house.png: 64x48")


def test_a_video_to_start_from(tmp_path: Path) -> None:
    typist = terminal(tmp_path, free_port())
    (tmp_path / "street.mp4").write_bytes(mp4(0.6, sound=False, fps=16))
    up = f"quartet up --pipeline dit --model {diffusion_checkpoint('wan')}"
    with typist.served(up, "ready after"):
        assert typist.type(line_with("--video street.mp4")).startswith("wrote night.mp4: 64x64, 9 frames")


def test_one_checkpoint_that_makes_and_understands(tmp_path: Path) -> None:
    checkpoint = str(diffusion_checkpoint("cosmos3"))
    port = free_port()
    typist = terminal(tmp_path, port, **{"nvidia/Cosmos3-Nano": checkpoint})
    small = "--dit-arg=--default-size=64x48 --dit-arg=--max-frames=9 --thinker-arg=--kv-cache-bytes=16777216"
    small += " --dit-arg=--served-model-name=painter"
    with typist.served(f"{line_with('--pipeline text-dit')} {small}", "ready after"):
        assert typist.type(line_with("a harbor at dawn")).startswith("wrote harbor.png: 64x48")
        assert typist.type(line_with("the boats leave")).startswith("wrote boats.mp4: 64x48, 9 frames")
        assert typist.type(line_with("What do you see?")).strip()
        models = {
            each["id"]: each["quartet"] for each in httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
        }
    assert list(models) == [checkpoint, "painter"]
    assert models[checkpoint]["output_modalities"] == ["text"]
    assert models["painter"]["output_modalities"] == ["video", "image"]
    with av.open(str(tmp_path / "boats.mp4")) as file:
        assert [(each.type, each.rate) for each in file.streams.audio] == [("audio", 12_000)]


def test_classes(tmp_path: Path) -> None:
    typist = terminal(tmp_path, free_port())
    up = f"quartet up --pipeline dit --model {unlisted_checkpoint(unlisted.class_images)}"
    with typist.served(up, "ready after"):
        assert typist.type(line_with("golden retriever")).startswith("wrote dog.png: 64x64")


def test_a_modular_pipeline(tmp_path: Path) -> None:
    typist = terminal(tmp_path, free_port())
    Image.linear_gradient("L").resize((64, 48)).convert("RGB").save(tmp_path / "dawn.png")
    up = f"quartet up --pipeline dit --model {modular_checkpoint('StableDiffusionXLModularPipeline')}"
    with typist.served(up, "ready after"):
        asked = "quartet image 'a red fox' --seed 1"
        assert typist.type(f"{asked} --size 64x48 --out a.png").startswith("wrote a.png: 64x48")
        assert typist.type(f"{asked} --steps 4 --image dawn.png --out b.png").startswith("wrote b.png: 64x48")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()
