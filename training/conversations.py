"""Trains the thinker for conversations: questions of all sorts one after another, about images that come at any turn.

Before, nearly all of its dialogues had one or two questions, and an image only with the first.
"""

import random
from dataclasses import replace
from functools import partial

import torch

from training import loop, paintings
from training.dialogue import Dialogue, Turn
from training.functions import call, image_tool, weather_tool
from training.prompts import ImagePrompt, draw_seen
from training.scene_questions import about, seeing
from training.scenes import Picture
from training.seeing import draw_training_scene
from training.thinker import Bank, Example, LanguageModel, draw_example, example
from training.tools import SPOKEN_WEATHER, among, change, draw_tools, drawn, reported, request
from training.words import CITIES
from training.world import KINDS, draw_dialogue, weather

STEPS = 1_800
RATE, MUON_RATE = 7e-4, 7e-4
BATCH, GROUPS = 20, 4  # dialogues of a step, and forwards of it
CONVERSATIONS, ABOUT_TOOLS, SCENES = 6, 3, 6  # of a batch; the rest is as before, so that nothing is forgotten
MOST_QUESTIONS = 5
PAINTED = 0.4  # of training's images with a large shape: the image model's own
_OTHERS = {kind: share for kind, share in KINDS.items() if kind not in (seeing, weather)}


class Conversation:
    """Draws one question after another.

    Args:
        draw: the source of chance.
        held_out: whether images and questions are those that are never trained on.
    """

    def __init__(self, draw: random.Random, held_out: bool = False) -> None:
        self._draw, self._held_out = draw, held_out
        self.turns: list[Turn] = []
        self.tools: tuple[dict, ...] = ()
        self._picture: Picture | None = None  # the last one: questions are about it
        self._by_tool = self._says = False
        self._weather = None
        if draw.random() < 0.2:
            tool, self._says = image_tool(draw)
            self._draws = True
            self.tools = among(draw, tool, most=1)
        else:
            self._draws = False
        if draw.random() < 0.08:
            self._weather = weather_tool(draw, ("get_weather",))
            self.tools = (*self.tools, self._weather[0])

    def go_on(self, questions: int) -> int:
        """Appends a question, or some that belong together. Returns how many.

        Args:
            questions: the most.
        """
        seen, change_it = self._picture is not None, self._by_tool and self._says
        parts = {
            self._show: 1 if seen else 3,
            self._ask: 5 if seen else 0,
            partial(self._other, questions): 4,
            self._paint: 3 if self._draws else 0,
            self._change: 2 if change_it else 0,
            self._ask_weather: 2 if self._weather else 0,
        }
        before = len(self.turns)
        self._draw.choices(list(parts), list(parts.values()))[0]()
        return sum(not turn.by_tool for turn in self.turns[before:])

    def _show(self) -> None:
        if self._draw.random() < 0.5:
            self._picture = draw_training_scene(self._draw, self._held_out)
        else:
            self._picture = self._large()
        self._by_tool = False
        self.turns.append(replace(about(self._draw, self._picture), shown=self._picture))

    def _large(self) -> ImagePrompt:
        if self._held_out or self._draw.random() > PAINTED:
            return draw_seen(self._draw, self._held_out)
        return self._draw.choice(paintings.bank())

    def _ask(self) -> None:
        assert self._picture is not None
        self.turns.append(about(self._draw, self._picture))

    def _other(self, questions: int) -> None:
        while True:
            turns = draw_dialogue(self._draw, self._held_out, _OTHERS).turns
            if len(turns) <= questions:
                self.turns += turns
                return

    def _paint(self) -> None:
        prompt = self._large()
        asked, wanted = request(self._draw, prompt, self._says)
        self._show_drawn(asked, prompt if wanted == prompt else drawn_by_program(wanted))

    def _change(self) -> None:
        assert isinstance(self._picture, ImagePrompt)
        asked, wanted = change(self._draw, self._picture)
        self._show_drawn(asked, drawn_by_program(wanted))

    def _show_drawn(self, asked: Turn, prompt: ImagePrompt) -> None:
        self._picture, self._by_tool = prompt, True
        self.turns += [asked, drawn(prompt)]

    def _ask_weather(self) -> None:
        assert self._weather is not None
        (tool, place, more), city = self._weather, self._draw.choice(CITIES)
        asked = self._draw.choice(SPOKEN_WEATHER).format(city=city)
        self.turns.append(Turn(asked, call(tool["function"]["name"], {place: city, **more})))
        self.turns.append(reported(self._draw, place, city))


def drawn_by_program(prompt: ImagePrompt) -> ImagePrompt:
    """`prompt` without the image model's image, which is another one's."""
    fields = {name: value for name, value in vars(prompt).items() if name != "image"}
    return ImagePrompt(**fields)


def draw_conversation(draw: random.Random, held_out: bool = False, questions: int | None = None) -> Dialogue:
    """Draws a conversation of so many `questions`; None: of two to MOST_QUESTIONS."""
    count = questions or draw.randint(2, MOST_QUESTIONS)
    said = Conversation(draw, held_out)
    while count > 0:
        count -= said.go_on(count)
    if said.turns[-1].by_tool and draw.random() < 0.5:
        said.turns.pop()
    return Dialogue("conversation", tuple(said.turns), tools=said.tools)


def as_example(draw: random.Random, bank: Bank, dialogue: Dialogue) -> Example:
    """`dialogue` as the model reads it, with sounds and images of `bank`."""
    audio_rows, image_rows = partial(bank.audio_rows, draw), partial(bank.image_rows, draw)
    return example(draw, dialogue, audio_rows, image_rows, draw.random() < 0.4)


def train() -> None:
    """Trains the thinker for `STEPS` more steps, resumable."""
    torch.manual_seed(0)
    bank, model = Bank.load(), LanguageModel()
    model.load_state_dict(loop.load("tools", LanguageModel()).state_dict())
    optimizers = loop.Optimizers(model, RATE, outer=("embed", "head"), muon_rate=MUON_RATE)

    def step_loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        draw = random.Random(f"conversations {step}")
        batch = [("conversations", as_example(draw, bank, draw_conversation(draw))) for _ in range(CONVERSATIONS)]
        batch += [("tools", draw_tools(draw, bank)) for _ in range(ABOUT_TOOLS)]
        # Questions about an image of several things: counting is forgotten first.
        batch += [("scenes", as_example(draw, bank, draw_dialogue(draw, kinds={seeing: 1.0}))) for _ in range(SCENES)]
        batch += [("others", draw_example(draw, bank)) for _ in range(BATCH - len(batch))]
        batch.sort(key=lambda pair: len(pair[1].ids))
        loss, right = torch.zeros(()), []
        for group in range(GROUPS):
            part, said = model([each for _, each in batch[group * BATCH // GROUPS : (group + 1) * BATCH // GROUPS]])
            loss, right = loss + part / GROUPS, right + said.tolist()
        sorts: dict[str, list[bool]] = {}
        for said, (sort, _) in zip(right, batch, strict=True):
            sorts.setdefault(sort, []).append(said)
        return loss, {sort: sum(said) / len(said) for sort, said in sorted(sorts.items())}

    loop.run("conversations", model, optimizers, STEPS, step_loss)
