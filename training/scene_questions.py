"""Questions about an image, and their answers."""

import random
from collections import Counter

from training.dialogue import Dialogue, Turn, article
from training.prompts import ImagePrompt
from training.scenes import Picture, Scene, draw_scene
from training.words import COLOURS, NUMBERS, PLURALS, SHAPES

_GROUND_QUESTIONS = (
    "What colour is the ground?",
    "Which colour is the ground?",
    "What is the colour of the ground?",
    "Which colour does the ground have?",
    "What colour is the background?",
    "What colour is behind the {shape}?",
)


def seeing(draw: random.Random, scene: Scene | None = None) -> Dialogue:
    """Draws one to three questions about `scene`, or about a drawn one."""
    scene = scene or draw_scene(draw)
    turns = [_about(draw, scene.things)]
    while draw.random() < 0.25 and len(turns) < 3:
        turns.append(_about(draw, scene.things))
    return Dialogue("seeing", tuple(turns), scene)


def about(draw: random.Random, picture: Picture) -> Turn:
    """Draws a question about `picture`; of one with a large shape, its ground, colour and shape are asked, too."""
    chance = draw.random()
    if not isinstance(picture, ImagePrompt) or chance > 0.5:
        return _about(draw, picture.things)
    if chance < 0.3:  # no voice of training says "ground"
        question = draw.choice(_GROUND_QUESTIONS).format(shape=picture.shape)
        return Turn(question, f"It is {picture.ground}.", spoken=False)
    if chance < 0.4:
        return Turn(draw.choice(("What colour is it?", "Which colour is it?")), f"It is {picture.colour}.")
    question = draw.choice(("What shape is it?", "Which shape is it?"))
    return Turn(question, f"It is {article(picture.shape)}.", spoken=False)


def _about(draw: random.Random, things: Counter[tuple[str, str]]) -> Turn:
    ask = draw.choice(("see", "see", "count", "count", "colour", "is", "all"))
    colour, shape = draw.choice([*things, (draw.choice(list(COLOURS)), draw.choice(SHAPES))])
    if ask == "see":
        question = draw.choice(
            ("What do you see?", "What is in the picture?", "Tell me what you see.", "What can you see?")
        )
        return Turn(question, f"I see {_list_of(things)}.")
    if ask == "count":
        count = sum(other == shape for _, other in things.elements())
        question = draw.choice((f"How many {PLURALS[shape]} are there?", f"How many {PLURALS[shape]} do you see?"))
        return Turn(question, f"I see {_count(count, shape)}.")
    if ask == "colour":
        shape = draw.choice(sorted({shape for _, shape in things}))
        colours = sorted({colour for colour, other in things if other == shape}, key=list(COLOURS).index)
        many = sum(other == shape for _, other in things.elements()) > 1
        noun, verb = (PLURALS[shape], "are") if many else (shape, "is")
        return Turn(f"What colour {verb} the {noun}?", f"The {noun} {verb} {' and '.join(colours)}.")
    if ask == "is":
        name = article(f"{colour} {shape}")
        answer = (
            f"Yes, I see {_list_of(things, (colour, shape))}." if things[colour, shape] else f"No, I do not see {name}."
        )
        return Turn(draw.choice((f"Is there {name}?", f"Do you see {name}?")), answer)
    total = things.total()
    question = draw.choice(("How many things are there?", "How many things do you see?"))
    return Turn(question, f"I see {NUMBERS[total]} {'thing' if total == 1 else 'things'}.")


def _count(count: int, shape: str) -> str:
    if count == 0:
        return f"no {PLURALS[shape]}"
    return f"one {shape}" if count == 1 else f"{NUMBERS[count]} {PLURALS[shape]}"


def _list_of(things: "dict[tuple[str, str], int]", only: tuple[str, str] | None = None) -> str:
    """ "two blue circles and a yellow star": in the order of colours, then shapes."""
    ordered = sorted(things, key=lambda kind: (list(COLOURS).index(kind[0]), SHAPES.index(kind[1])))
    names = [
        article(f"{colour} {shape}")
        if things[colour, shape] == 1
        else f"{NUMBERS[things[colour, shape]]} {colour} {PLURALS[shape]}"
        for colour, shape in ordered
        if only in (None, (colour, shape))
    ]
    return " and ".join(names)
