"""The vision encoder: each row encodes colour and shape in its square of the image.

A row is the text embedding of the colour plus that of the shape, or that of nothing. Images of the image model's sort
have one large shape: the row of one square encodes it, all others encode the colour of the ground. Trained by itself;
paintings.py goes on with it.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from services.families.qwen3_omni.tiny.processor import PATCH
from training import loop
from training.dialogue import is_held_out
from training.prompts import ImagePrompt
from training.scenes import GRID, SIDE, Picture, Scene, draw_scene
from training.shape import build, text_embeddings, tokenizer
from training.words import COLOURS, SHAPES

STEPS = 1_500
RATE, MUON_RATE = 2e-3, 2e-3
BATCH = 32
SHARPNESS = 20.0  # logit of a row that is an embedding
NOTHING, GROUND = "<|image_pad|>", "<|video_pad|>"  # tokens that no text of the world has
UNNAMED = -100  # the number of a colour without a name, which is not asked for
LARGE_AT = GRID + 1  # the square whose row encodes a large shape: a middle one
PIXELS = {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE}  # every scene is scaled to as many


@cache
def tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings of colours (colours, width), of shapes and then a ground (shapes + 1, width), of nothing (width,)."""
    table, to_text = text_embeddings(), tokenizer()
    colours, shapes = ([to_text.encode(f" {name}")[0] for name in names] for names in (COLOURS, SHAPES))
    ground, nothing = (to_text.convert_tokens_to_ids(name) for name in (GROUND, NOTHING))
    return table[colours], table[[*shapes, ground]], table[nothing]


def numbers(picture: Scene | ImagePrompt) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of the colour (or UNNAMED) and of the shape in each square, row by row; -1 where nothing is."""
    if isinstance(picture, ImagePrompt):
        colour, ground = (list(COLOURS).index(name) if name else UNNAMED for name in (picture.colour, picture.ground))
        colours, shapes = torch.full((GRID * GRID,), ground), torch.full((GRID * GRID,), len(SHAPES))
        colours[LARGE_AT], shapes[LARGE_AT] = colour, SHAPES.index(picture.shape)
        return colours, shapes
    colours, shapes = (torch.full((GRID * GRID,), -1) for _ in range(2))
    for thing in picture.contents:
        colours[thing.row * GRID + thing.column] = list(COLOURS).index(thing.colour)
        shapes[thing.row * GRID + thing.column] = SHAPES.index(thing.shape)
    return colours, shapes


def ideal(picture: Scene | ImagePrompt) -> torch.Tensor:
    """Rows of a perfect encoder: (squares, width)."""
    colour, shape = numbers(picture)
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


def loss_of(
    model: VisionEncoder,
    images: list[Image.Image],
    pictures: Sequence[Scene | ImagePrompt],
    thing_weight: float = 1.0,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss and figures of `images`, which show `pictures`.

    Args:
        thing_weight: how much more a square with a thing counts than one without.
    """
    colours, shapes, nothing = tables()
    scale = SHARPNESS / colours.shape[1]
    rows = model.encode(images).flatten(0, 1)
    wanted = torch.cat([ideal(picture) for picture in pictures])
    colour, shape = (torch.cat(each) for each in zip(*map(numbers, pictures), strict=True))
    there, known = shape >= 0, colour != UNNAMED
    things = there & (shape < len(SHAPES))
    weight = 1 + (thing_weight - 1) * things
    logits = [rows @ torch.cat((table, nothing[None])).T * scale for table in (colours, shapes)]
    named = sum(
        (weight * _missing(logit, torch.where(there, number, len(table)))).sum() / weight.sum()
        for logit, number, table in zip(logits, (colour, shape), (colours, shapes), strict=True)
    )
    right = (logits[0].argmax(1) == colour) & (logits[1].argmax(1) == shape)
    things &= known
    distance = functional.mse_loss(rows[known], wanted[known])
    return named + 0.2 * distance, {"things": right[things].float().mean().item(), "distance": distance.item()}


def _missing(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The cross entropy of each row; 0 where the number is UNNAMED."""
    return functional.cross_entropy(logits, numbers, ignore_index=UNNAMED, reduction="none")


def train() -> None:
    """Trains the vision encoder: `STEPS` steps, resumable."""
    torch.manual_seed(0)
    model = VisionEncoder()
    optimizers = loop.Optimizers(model, RATE, outer=("embed", "pos"), muon_rate=MUON_RATE)

    def step_loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        draw = random.Random(f"seeing {step}")
        scenes = [draw_training_scene(draw) for _ in range(BATCH)]
        return loss_of(model, [scene.render() for scene in scenes], scenes)

    loop.run("seeing", model, optimizers, STEPS, step_loss)


@cache
def load() -> VisionEncoder:
    """The trained encoder, which paintings.py has trained last."""
    model = VisionEncoder()
    loop.load("paintings", model)
    return model


@torch.inference_mode()
def rows_of(picture: Picture) -> torch.Tensor:
    """The encoder's rows of one image: (squares, width)."""
    return load().encode([picture.render()])[0].clone()
