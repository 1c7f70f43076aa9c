"""Images of coloured shapes on a ground, drawn in the squares of a grid."""

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image, ImageDraw

from training.words import COLOURS, SHAPES

SIDE = 128  # pixels
GRID = 4  # squares a side: each is what one token of the vision encoder covers
SQUARE = SIDE // GRID
MOST_THINGS = 5
FINER = 4  # drawn larger by this, then scaled down: edges are smooth
_GROUNDS = ((128, 128, 128), (190, 190, 185), (90, 100, 105), (165, 150, 140))


class Picture(Protocol):
    """What can be seen: a scene, or an image of the image model's sort."""

    @property
    def things(self) -> "Counter[tuple[str, str]]":
        """Counts each (colour, shape)."""
        ...

    def render(self) -> Image.Image:
        """Returns an RGB image, SIDE x SIDE."""
        ...


@dataclass(frozen=True)
class SceneObject:
    """A shape in a square: `row` and `column` in the grid, centre in pixels, `size` its half width in pixels."""

    colour: str
    shape: str
    row: int
    column: int
    x: float
    y: float
    size: float
    angle: float  # degrees


@dataclass(frozen=True)
class Scene:
    """Shapes on a ground of one colour (red, green, blue, 0 to 255); `noise`: standard deviation a pixel."""

    contents: tuple[SceneObject, ...]
    ground: tuple[int, int, int]
    noise: float
    seed: int

    @property
    def things(self) -> Counter[tuple[str, str]]:
        """Counts each (colour, shape)."""
        return Counter((thing.colour, thing.shape) for thing in self.contents)

    def render(self) -> Image.Image:
        """Returns an RGB image, SIDE x SIDE."""
        image = Image.new("RGB", (SIDE * FINER, SIDE * FINER), self.ground)
        canvas = ImageDraw.Draw(image)
        for thing in self.contents:
            draw_shape(
                canvas, thing.shape, COLOURS[thing.colour], self.ground, thing.x, thing.y, thing.size, thing.angle
            )
        image = image.resize((SIDE, SIDE), Image.Resampling.BOX)
        if not self.noise:
            return image
        noise = np.random.default_rng(self.seed).normal(0, self.noise, (SIDE, SIDE, 3))
        return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def draw_shape(
    canvas: ImageDraw.ImageDraw,
    shape: str,
    colour: tuple[int, int, int] | int,
    ground: tuple[int, int, int] | int,
    x: float,
    y: float,
    size: float,
    angle: float = 0.0,
) -> None:
    """Draws `shape` around (x, y), `size` pixels to each side, on a canvas that is `FINER` times as large."""
    x, y, size = x * FINER, y * FINER, size * FINER
    box = (x - size, y - size, x + size, y + size)
    if shape in ("circle", "ring"):
        canvas.ellipse(box, fill=colour)
        if shape == "ring":
            inner = 0.5 * size
            canvas.ellipse((x - inner, y - inner, x + inner, y + inner), fill=ground)
        return
    third = 0.33
    corners = {
        "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        "triangle": [(0, -1), (1, 0.85), (-1, 0.85)],
        "star": [
            (radius * math.sin(i * math.pi / 5), -radius * math.cos(i * math.pi / 5))
            for i in range(10)
            for radius in [1.05 if i % 2 == 0 else 0.42]
        ],
        "cross": [
            *((-third, -1), (third, -1), (third, -third), (1, -third), (1, third), (third, third)),
            *((third, 1), (-third, 1), (-third, third), (-1, third), (-1, -third), (-third, -third)),
        ],
    }[shape]
    turn = math.radians(angle)
    cos, sin = math.cos(turn), math.sin(turn)
    canvas.polygon([(x + size * (u * cos - v * sin), y + size * (u * sin + v * cos)) for u, v in corners], fill=colour)


def draw_scene(draw: random.Random) -> Scene:
    """Draws one to MOST_THINGS shapes of one or two kinds, each in a square of its own."""
    ground = draw.choice(_GROUNDS)
    kinds = [(draw.choice(list(COLOURS)), draw.choice(SHAPES)) for _ in range(draw.choice((1, 2, 2)))]
    count = draw.randint(len(kinds), MOST_THINGS)
    chosen = kinds + [draw.choice(kinds) for _ in range(count - len(kinds))]
    squares = draw.sample(range(GRID * GRID), count)
    contents = []
    for (colour, shape), square in zip(chosen, squares, strict=True):
        size = draw.uniform(9, 13)
        room = SQUARE / 2 - size - 1
        x, y = (SQUARE * (at + 0.5) + draw.uniform(-room, room) for at in (square % GRID, square // GRID))
        contents.append(SceneObject(colour, shape, square // GRID, square % GRID, x, y, size, draw.uniform(-12, 12)))
    return Scene(tuple(contents), ground, draw.choice((0.0, 2.0, 5.0)), draw.getrandbits(32))
