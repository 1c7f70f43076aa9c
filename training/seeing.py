"""The vision encoder: each row encodes colour and shape in its square of the image.

A row is the text embedding of the colour plus that of the shape, or that of nothing. Trained by itself.
"""

import random
from functools import cache
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from services.families.qwen3_omni.tiny.processor import PATCH
from training import loop
from training.dialogue import is_held_out
from training.scenes import GRID, SIDE, Scene, draw_scene
from training.shape import build, text_embeddings, tokenizer
from training.words import COLOURS, SHAPES

STEPS = 1_500
RATE, MUON_RATE = 2e-3, 2e-3
BATCH = 32
SHARPNESS = 20.0  # logit of a row that is an embedding
NOTHING = "<|image_pad|>"
PIXELS = {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE}  # every scene is scaled to as many


@cache
def tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings of colours (colours, width) and shapes (shapes, width), and of nothing (width,)."""
    table, to_text = text_embeddings(), tokenizer()
    colours, shapes = ([to_text.encode(f" {name}")[0] for name in names] for names in (COLOURS, SHAPES))
    return table[colours], table[shapes], table[to_text.convert_tokens_to_ids(NOTHING)]


def numbers(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of the colour and of the shape in each square, row by row; -1 where nothing is."""
    colours, shapes = (torch.full((GRID * GRID,), -1) for _ in range(2))
    for thing in scene.contents:
        colours[thing.row * GRID + thing.column] = list(COLOURS).index(thing.colour)
        shapes[thing.row * GRID + thing.column] = SHAPES.index(thing.shape)
    return colours, shapes


def ideal(scene: Scene) -> torch.Tensor:
    """Rows of a perfect encoder: (squares, width)."""
    colour, shape = numbers(scene)
    colours, shapes, nothing = tables()
    rows = colours[colour.clamp_min(0)] + shapes[shape.clamp_min(0)]
    return torch.where((colour >= 0)[:, None], rows, nothing)


@cache
def _processor() -> Any:
    import transformers

    return transformers.Qwen2VLImageProcessor(size=PIXELS, **PATCH)


def patches(images: list[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels and grid as the published processor makes them."""
    made = _processor()(images=images, return_tensors="pt")
    return made["pixel_values"], made["image_grid_thw"]


class VisionEncoder(nn.Module):
    """The reference's vision encoder, with zeros for the thinker's deeper layers."""

    def __init__(self) -> None:
        super().__init__()
        self.visual: Any = build("thinker").visual  # type: ignore[union-attr]
        for p in self.visual.merger_list.parameters():
            nn.init.zeros_(p)
            p.requires_grad_(False)

    def encode(self, images: list[Image.Image]) -> torch.Tensor:
        """(scenes, squares, width of the thinker)."""
        pixels, grid = patches(images)
        return self.visual(pixels, grid_thw=grid).pooler_output.view(len(images), GRID * GRID, -1)


def draw_training_scene(draw: random.Random, held_out: bool = False) -> Scene:
    """Draws a scene whose set of shapes is trained on, or held out."""
    while True:
        scene = draw_scene(draw)
        if is_held_out(f"{sorted(scene.things.items())}") == held_out:
            return scene


def train() -> None:
    """Trains the vision encoder: `STEPS` steps, resumable."""
    torch.manual_seed(0)
    model = VisionEncoder()
    optimizers = loop.Optimizers(model, RATE, outer=("embed", "pos"), muon_rate=MUON_RATE)
    colours, shapes, nothing = tables()
    scale = SHARPNESS / colours.shape[1]

    def step_loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        draw = random.Random(f"seeing {step}")
        scenes = [draw_training_scene(draw) for _ in range(BATCH)]
        rows = model.encode([scene.render() for scene in scenes]).flatten(0, 1)
        wanted = torch.cat([ideal(scene) for scene in scenes])
        colour, shape = (torch.cat(each) for each in zip(*map(numbers, scenes), strict=True))
        there = colour >= 0
        logits = [rows @ torch.cat((table, nothing[None])).T * scale for table in (colours, shapes)]
        named = sum(
            functional.cross_entropy(logit, torch.where(there, number, len(table)))
            for logit, number, table in zip(logits, (colour, shape), (colours, shapes), strict=True)
        )
        right = (logits[0].argmax(1) == colour) & (logits[1].argmax(1) == shape)
        loss = named + 0.2 * functional.mse_loss(rows, wanted)
        return loss, {"things": right[there].float().mean().item(), "distance": (rows - wanted).pow(2).mean().item()}

    loop.run("seeing", model, optimizers, STEPS, step_loss)


def load() -> VisionEncoder:
    model = VisionEncoder()
    loop.load("seeing", model)
    return model
