"""What the image model is asked for: one shape on a ground, and the image that a program draws of it."""

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from PIL import Image, ImageDraw

from training.dialogue import article, is_held_out
from training.scenes import FINER, SIDE, draw_shape
from training.words import COLOURS, SHAPES

JITTER = 4  # pixels, to each side: how far from the middle a shape may be
SIZES = {"small": (20, 25), "": (29, 35), "big": (40, 47)}  # half widths in pixels
UNNAMED_FROM = 60  # of 255: the least distance of a colour without a name from all that have one
PROMPTS = (
    "{a} on a {ground} ground",
    "{a} on {ground}",
    "Paint {a} on a {ground} ground.",
    "a picture of {a} on a {ground} ground",
    "{a}, the ground is {ground}",
    "Draw {a} on a {ground} ground.",
)


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt and the parameters of one image of it."""

    prompt: str
    colour: str
    shape: str
    size: str
    ground: str
    x: float
    y: float
    radius: float

    @property
    def things(self) -> Counter[tuple[str, str]]:
        """Counts the one (colour, shape)."""
        return Counter([(self.colour, self.shape)])

    def render(self) -> Image.Image:
        """Returns an RGB image, SIDE x SIDE."""
        return self._in_colours(COLOURS[self.colour], COLOURS[self.ground])

    def _in_colours(self, colour: tuple[int, int, int], ground: tuple[int, int, int]) -> Image.Image:
        image = Image.new("RGB", (SIDE * FINER, SIDE * FINER), ground)
        draw_shape(ImageDraw.Draw(image), self.shape, colour, ground, self.x, self.y, self.radius)
        return image.resize((SIDE, SIDE), Image.Resampling.BOX)


@dataclass(frozen=True)
class Painting(ImagePrompt):
    """A prompt, and the image that the image model made of it."""

    image: Image.Image = field(compare=False)

    def render(self) -> Image.Image:
        """Returns the image model's image."""
        return self.image


@dataclass(frozen=True)
class Unnamed(ImagePrompt):
    """An image for the vision encoder alone, in which the colour or the ground has no name: "", and is `unnamed`.

    With these, it does not learn combinations by heart.
    """

    unnamed: tuple[int, int, int]

    def render(self) -> Image.Image:
        """Returns an RGB image, SIDE x SIDE."""
        return self._in_colours(COLOURS.get(self.colour, self.unnamed), COLOURS.get(self.ground, self.unnamed))


def draw_unnamed(draw: random.Random) -> Unnamed:
    """Draws an image with one named colour, and one that is far from all that have names."""
    fields: dict[str, Any] = vars(draw_image_prompt(draw))
    fields = fields | {"shape": draw.choice(SHAPES), draw.choice(("colour", "ground")): ""}
    while True:
        unnamed = (draw.randrange(256), draw.randrange(256), draw.randrange(256))
        if min(math.dist(unnamed, named) for named in COLOURS.values()) > UNNAMED_FROM:
            return Unnamed(**fields, unnamed=unnamed)


def draw_image_prompt(draw: random.Random, held_out: bool = False) -> ImagePrompt:
    """Draws a prompt whose colour, shape and ground are all trained on together, or held out together."""
    while True:
        colour, ground = draw.sample(list(COLOURS), 2)
        shape, size = draw.choice(SHAPES), draw.choice(("", "", "small", "big"))
        if is_held_out(f"{colour} {shape} on {ground}") != held_out:
            continue
        thing = article(" ".join(filter(None, (size, colour, shape))))
        radius = draw.uniform(*SIZES[size])
        x, y = (SIDE / 2 + draw.uniform(-JITTER, JITTER) for _ in range(2))
        prompt = draw.choice(PROMPTS).format(a=thing, ground=ground)
        return ImagePrompt(prompt, colour, shape, size, ground, x, y, radius)


def draw_seen(draw: random.Random, held_out: bool = False) -> ImagePrompt:
    """Draws what the thinker looks at: as above, and training has no set of shapes that scenes hold out."""
    while True:
        prompt = draw_image_prompt(draw, held_out)
        if held_out or not is_held_out(f"{sorted(prompt.things.items())}"):
            return prompt


def draw_edit(draw: random.Random) -> tuple[ImagePrompt, ImagePrompt]:
    """Draws a prompt of training and a held-out one: the same shape and ground in another colour."""
    wanted = draw_image_prompt(draw, held_out=True)
    while True:
        given = draw_image_prompt(draw)
        if (given.shape, given.ground) == (wanted.shape, wanted.ground):
            return given, wanted
