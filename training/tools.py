"""Trains the thinker to call tools, and to answer as before where no tool fits.

It learns the weather of a city by a function, and images by the gateway's `image_generation`.
"""

import json
import random
import string
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gateway.answers.tools.generators import ImageGenerator
from training import loop
from training.dialogue import Dialogue, Turn, article, capital
from training.functions import Tool, call, image_tool, other_tool, weather_tool
from training.prompts import ImagePrompt, draw_image_prompt
from training.thinker import Bank, Example, LanguageModel, draw_example, example
from training.words import CITIES, COLOURS, FOREIGN, THINGS, UNKNOWN
from training.world import KINDS, WEATHER, draw_dialogue, outside

STEPS = 1_000
RATE, MUON_RATE = 7e-4, 7e-4
BATCH, GROUPS = 36, 6  # as of the thinker
ABOUT_TOOLS = 14  # of a batch; the rest is as before, so that nothing is forgotten
FORCED = 0.12  # of the calls: as `tool_choice` forces them, without the marks and the spaces

_WEATHER_QUESTIONS = (
    "What is the weather in {city}?",
    "How is the weather in {city}?",
    "Tell me the weather in {city}.",
    "What is the weather like in {city}?",
    "What is the weather like in {city} today?",
    "How is the weather in {city} today?",
    "What is the weather in {city} now?",
    "Is it sunny in {city}?",
    "Is it cold in {city} today?",
    "Weather in {city}?",
)
SPOKEN_WEATHER = _WEATHER_QUESTIONS[:3]  # all whose words are known to the audio encoder
_DRAW = (
    "Draw {a} on a {ground} ground.",
    "Paint {a} on a {ground} ground.",
    "Draw {a} on {ground}.",
    "Paint me {a} on a {ground} ground, please.",
    "Make a picture of {a} on a {ground} ground.",
    "Please draw {a} on a {ground} ground.",
    "Can you draw {a} on a {ground} ground?",
    "I want a picture of {a} on a {ground} ground.",
)
_DRAW_PLAIN = ("Draw {a}.", "Paint {a}.", "Draw me {a}.", "Make a picture of {a}.", "Can you paint {a}?")
_CHANGE = ("Now make it {colour}.", "Make it {colour}.", "Now in {colour}, please.", "Paint it {colour}.")


def among(draw: random.Random, tool: Tool | None, most: int = 2) -> tuple[Tool, ...]:
    """Mixes `tool` with others, seldom with many."""
    others = [other_tool(draw) for _ in range(draw.choice((0, 0, 0, 1, 1, most)))]
    tools = [*others, *([tool] if tool else [])]
    draw.shuffle(tools)
    return tuple(tools)


def _city(draw: random.Random) -> str:
    chance = draw.random()
    if chance < 0.6:
        return draw.choice(CITIES)
    if chance < 0.75:
        return draw.choice(FOREIGN)
    if chance < 0.85:
        return f"{capital(draw.choice(THINGS))} {capital(draw.choice(THINGS))}"
    return capital("".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 8))))


def weather(draw: random.Random, names: Sequence[str] = ()) -> Dialogue:
    """Draws a question about the weather with a function for it: the call, or the answer after its result.

    Args:
        names: of the function, for tests, whose cities are the world's; none: those of training.
    """
    tool, place, more = weather_tool(draw, names)
    is_spoken = draw.random() < 0.5
    city = draw.choice(CITIES) if is_spoken or names else _city(draw)
    question = draw.choice(SPOKEN_WEATHER if is_spoken else _WEATHER_QUESTIONS).format(city=city)
    turn = Turn(question, call(tool["function"]["name"], {place: city, **more}), spoken=is_spoken)
    tools = among(draw, tool)
    if draw.random() < 0.15:
        tools = (*tools, image_tool(draw)[0])
    if draw.random() < 0.65:
        return Dialogue("weather", (turn,), tools=tools)
    return Dialogue("weather", (turn, reported(draw, place, city)), tools=tools)


def reported(draw: random.Random, place: str, city: str) -> Turn:
    """Draws a function's report about the weather in `city`, and the answer."""
    what = draw.choice(sorted(WEATHER))
    report: dict[str, Any] = {draw.choice(("weather", "condition", "forecast")): what}
    if draw.random() < 0.4:
        report = {draw.choice(("temperature", "temperature_c", "wind")): draw.randint(-10, 35), **report}
    if draw.random() < 0.3:
        report = {place: city, **report}
    said = draw.choice((what, f"It is {what}.", json.dumps(report), json.dumps(report)))
    return Turn(said, f"It is {what} in {city}.", False, by_tool=True)


def _ground_of(colour: str) -> str:
    return "black" if colour == "white" else "white"


def _described(prompt: ImagePrompt, colour: str | None = None) -> tuple[str, str]:
    """("a big red circle", the answer that describes its image)."""
    sized = " ".join(filter(None, (prompt.size, colour or prompt.colour, prompt.shape)))
    return article(sized), f"I see {article(f'{colour or prompt.colour} {prompt.shape}')}."


def drawing(draw: random.Random, held_out: bool = False) -> Dialogue:
    """Draws a request for an image with the tool for it: the call, the answer after its result, or an edit."""
    tool, says = image_tool(draw)
    prompt = draw_image_prompt(draw, held_out)
    turn, prompt = request(draw, prompt, says)
    tools = among(draw, tool, most=1)
    if draw.random() < 0.2:
        tools = (*tools, weather_tool(draw)[0])
    if draw.random() < 0.6:
        return Dialogue("drawing", (turn,), tools=tools)
    if draw.random() < 0.1:
        failed = ImageGenerator.failed + draw.choice(
            ("the stage is away", "it took too long", f"no {draw.choice(THINGS)}")
        )
        return Dialogue("drawing", (turn, Turn(failed, UNKNOWN, False, by_tool=True)), tools=tools)
    result = drawn(prompt)
    if draw.random() < 0.6 or not says:
        return Dialogue("drawing", (turn, result), tools=tools)
    return Dialogue("drawing", (turn, result, change(draw, prompt)[0]), tools=tools)


def request(draw: random.Random, prompt: ImagePrompt, says: bool) -> tuple[Turn, ImagePrompt]:
    """Draws a request for an image of `prompt`, with its call; in some, the ground is the model's choice.

    Args:
        says: whether a call has an action.
    """
    thing, _ = _described(prompt)
    if draw.random() < 0.25:
        prompt = replace(prompt, ground=_ground_of(prompt.colour))
        question = draw.choice(_DRAW_PLAIN).format(a=thing)
    else:
        question = draw.choice(_DRAW).format(a=thing, ground=prompt.ground)
    return Turn(question, _image_call(thing, prompt.ground, says), spoken=False), prompt


def drawn(prompt: ImagePrompt) -> Turn:
    """The tool's image, and the answer."""
    return Turn(ImageGenerator.done, _described(prompt)[1], False, by_tool=True, shown=prompt)


def change(draw: random.Random, prompt: ImagePrompt) -> tuple[Turn, ImagePrompt]:
    """Draws a request for `prompt` in another colour, with its call, which has an action."""
    colour = draw.choice([each for each in COLOURS if each not in (prompt.colour, prompt.ground)])
    changed = _image_call(_described(prompt, colour)[0], prompt.ground, True, "edit")
    turn = Turn(draw.choice(_CHANGE).format(colour=colour), changed, spoken=False)
    return turn, replace(prompt, colour=colour)


def _image_call(thing: str, ground: str, says: bool, action: str = "generate") -> str:
    return call(
        ImageGenerator.name, {"prompt": f"{thing} on a {ground} ground", **({"action": action} if says else {})}
    )


def left_alone(draw: random.Random, held_out: bool = False) -> Dialogue:
    """Draws any other dialogue, with tools that do not fit: the answer is as without them."""
    kinds = {kind: share for kind, share in KINDS.items() if kind.__name__ != "weather"}
    dialogue = outside(draw, held_out) if draw.random() < 0.12 else draw_dialogue(draw, held_out, kinds)
    chance = draw.random()
    if chance < 0.07:  # what a tool would be for that is not there
        city = _city(draw)
        question = draw.choice(_WEATHER_QUESTIONS).format(city=city)
        return Dialogue("left", (Turn(question, UNKNOWN, False),), tools=(other_tool(draw), *among(draw, None)))
    if chance < 0.14:
        question = draw.choice(_DRAW).format(
            a=_described(draw_image_prompt(draw))[0], ground=draw.choice(list(COLOURS))
        )
        return Dialogue("left", (Turn(question, UNKNOWN, False),), tools=among(draw, weather_tool(draw)[0]))
    special = draw.choice((weather_tool(draw)[0], image_tool(draw)[0], other_tool(draw)))
    return replace(dialogue, tools=among(draw, special, most=1))


def forced(each: Example) -> Example:
    """Drops the forced beginning of the last answer from the targets."""
    last = max(i for i, wanted in enumerate(each.wanted) if wanted)
    begin = last
    while begin and each.wanted[begin - 1]:
        begin -= 1
    return replace(each, wanted=[wanted and i > begin for i, wanted in enumerate(each.wanted)])


def draw_tools(draw: random.Random, bank: Bank) -> Example:
    dialogue = draw.choice((weather, weather, drawing, drawing, left_alone, left_alone, left_alone))(draw)
    is_forced = len(dialogue.turns) == 1 and dialogue.kind in ("weather", "drawing") and draw.random() < FORCED
    if is_forced:
        arguments = json.loads(dialogue.turns[0].answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        compact = replace(dialogue.turns[0], answer=json.dumps(arguments, separators=(",", ":")))
        dialogue = replace(dialogue, turns=(compact,))
    audio_rows, image_rows = partial(bank.audio_rows, draw), partial(bank.image_rows, draw)
    encoded = example(draw, dialogue, audio_rows, image_rows, draw.random() < 0.4)
    return forced(encoded) if is_forced else encoded


def train() -> None:
    """Trains the thinker for `STEPS` more steps, resumable."""
    torch.manual_seed(0)
    bank, model = Bank.load(), LanguageModel()
    model.load_state_dict(loop.load("thinker", LanguageModel()).state_dict())
    optimizers = loop.Optimizers(model, RATE, outer=("embed", "head"), muon_rate=MUON_RATE)

    def step_loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        draw = random.Random(f"tools {step}")
        drawn = [(draw_tools(draw, bank), True) for _ in range(ABOUT_TOOLS)]
        drawn += [(draw_example(draw, bank), False) for _ in range(BATCH - ABOUT_TOOLS)]
        drawn.sort(key=lambda pair: len(pair[0].ids))
        loss, right = torch.zeros(()), []
        for group in range(GROUPS):
            part, said = model([each for each, _ in drawn[group * BATCH // GROUPS : (group + 1) * BATCH // GROUPS]])
            loss, right = loss + part / GROUPS, right + said.tolist()
        with_tools = [said for said, (_, has) in zip(right, drawn, strict=True) if has]
        without = [said for said, (_, has) in zip(right, drawn, strict=True) if not has]
        return loss, {"tools": sum(with_tools) / len(with_tools), "others": sum(without) / len(without)}

    loop.run("tools", model, optimizers, STEPS, step_loss)
