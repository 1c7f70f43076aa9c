"""The vision encoder goes on: it learns the image model's images, and keeps the scenes.

Some of these images are drawn by a program, as those that the image model was trained on. Others are the image model's
own, as it ships: these have its mistakes. In others, one of the two colours has no name.
"""

import random
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from services.demo_models import PAINTER, resolve
from training import loop
from training.prompts import ImagePrompt, Painting, draw_seen, draw_unnamed
from training.scenes import SIDE, Scene
from training.seeing import VisionEncoder, draw_training_scene, loss_of

STEPS = 2_000
THING_WEIGHT = 8.0  # one square of sixteen has all about a large shape
RATE, MUON_RATE = 1e-3, 1e-3
BATCH, SCENES, PAINTINGS, UNNAMED = 32, 10, 7, 9  # images of a step; of these, three of its sorts
BANK_PAINTINGS = 1_200
PAINTER_STEPS = 8
_PAINTED_AT_ONCE = 16


class Painter:
    """The image model as it ships, by the reference's pipeline."""

    def __init__(self) -> None:
        import diffusers

        self._pipeline: Any = diffusers.ZImagePipeline.from_pretrained(  # pyright: ignore[reportPrivateImportUsage]
            resolve(PAINTER), torch_dtype=torch.float32
        )
        self._pipeline.set_progress_bar_config(disable=True)

    def paint(self, prompts: list[ImagePrompt], seeds: list[int]) -> list[Painting]:
        """Paints each prompt, with the noise of its seed."""
        images: list[Image.Image] = self._pipeline(
            [prompt.prompt for prompt in prompts],
            height=SIDE,
            width=SIDE,
            num_inference_steps=PAINTER_STEPS,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        ).images
        return [Painting(**vars(prompt), image=image) for prompt, image in zip(prompts, images, strict=True)]


@cache
def bank() -> list[Painting]:
    """The image model's images of training, which are painted once and kept beside the states."""
    file = loop.OUT / "paintings_bank.pt"
    prompts = [draw_seen(random.Random(f"painting {i}")) for i in range(BANK_PAINTINGS)]
    if not file.exists():
        painter, pixels = Painter(), list[torch.Tensor]()
        for begin in range(0, BANK_PAINTINGS, _PAINTED_AT_ONCE):
            numbers = list(range(begin, min(begin + _PAINTED_AT_ONCE, BANK_PAINTINGS)))
            painted = painter.paint([prompts[i] for i in numbers], numbers)
            pixels += [torch.from_numpy(np.asarray(each.image).copy()) for each in painted]
        torch.save(torch.stack(pixels), file)
        print(f"paintings: {BANK_PAINTINGS} images painted", flush=True)
    images = torch.load(file, weights_only=True).numpy()
    return [
        Painting(**vars(prompt), image=Image.fromarray(image)) for prompt, image in zip(prompts, images, strict=True)
    ]


def train() -> None:
    """Trains the vision encoder for `STEPS` more steps, resumable."""
    torch.manual_seed(0)
    painted, model = bank(), VisionEncoder()
    model.load_state_dict(loop.load("seeing", VisionEncoder()).state_dict())
    optimizers = loop.Optimizers(model, RATE, outer=("embed", "pos"), muon_rate=MUON_RATE)

    def step_loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        draw = random.Random(f"paintings {step}")
        pictures: list[Scene | ImagePrompt] = [draw_training_scene(draw) for _ in range(SCENES)]
        pictures += [draw.choice(painted) for _ in range(PAINTINGS)]
        pictures += [draw_unnamed(draw) for _ in range(UNNAMED)]
        pictures += [draw_seen(draw) for _ in range(BATCH - len(pictures))]
        return loss_of(model, [picture.render() for picture in pictures], pictures, THING_WEIGHT)

    loop.run("paintings", model, optimizers, STEPS, step_loss)
