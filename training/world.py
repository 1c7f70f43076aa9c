"""Questions and answers: dialogues drawn from templates, each a combination that is either trained on or held out.

A combination is a template with what stands in it ("What is {a} plus {b}?" with seven and five). A fifth of them is
held out by a hash of its text: no training has that question in those words.
"""

import json
import random
import re
from collections.abc import Callable

from training.dialogue import Dialogue, Turn, article, capital, is_held_out, one_turn
from training.scene_questions import seeing
from training.words import (
    ADJECTIVES,
    CAPITALS,
    CITIES,
    DAYS,
    DO,
    FOREIGN,
    MONTHS,
    NUMBERS,
    OBJECTS,
    ORDINALS,
    OUTSIDE,
    OUTSIDE_HELD_OUT,
    OUTSIDE_QUESTIONS,
    PLACES,
    SMALL_TALK,
    SORTS,
    SPELLED,
    SUBJECTS,
    THINGS,
    UNKNOWN,
    VERBS,
)

LARGEST = 20

SUMS = (
    "What is {a} plus {b}?",
    "How much is {a} plus {b}?",
    "{A} plus {b}?",
    "Can you add {a} and {b}?",
    "Add {a} and {b}.",
    "What do you get for {a} plus {b}?",
    "Can you add {a} to {b}?",
    "What is the sum of {a} and {b}?",
)
DIFFERENCES = (
    "What is {a} minus {b}?",
    "How much is {a} minus {b}?",
    "{A} minus {b}?",
    "Take {b} from {a}.",
    "Can you take {b} from {a}?",
    "What do you get for {a} minus {b}?",
)
AND_THEN = ("And {op} {b}?", "{Op} {b}?", "What about {op} {b}?", "Now {op} {b}.")


def sums(draw: random.Random) -> Dialogue:
    """A sum or a difference from zero to twenty, now and then followed by "and plus two?"."""
    a, b = draw.randint(0, LARGEST), draw.randint(0, LARGEST)
    if draw.random() < 0.5:
        a, b = sorted((a, b), reverse=True)
        first = _sum(draw, "minus", a, b)
    else:
        a = draw.randint(0, LARGEST - b)
        first = _sum(draw, "plus", a, b)
    turns = [first]
    while draw.random() < 0.3 and len(turns) < 3:
        turns.append(_next_sum(draw, turns[-1]))
    return Dialogue("sums", tuple(turns))


def _sum(draw: random.Random, op: str, a: int, b: int) -> Turn:
    names = {"a": NUMBERS[a], "b": NUMBERS[b], "A": capital(NUMBERS[a])}
    question = draw.choice(SUMS if op == "plus" else DIFFERENCES).format(**names)
    result = a + b if op == "plus" else a - b
    return Turn(question, f"{capital(NUMBERS[a])} {op} {NUMBERS[b]} is {NUMBERS[result]}.", result=result)


def _next_sum(draw: random.Random, before: Turn) -> Turn:
    a = before.result or 0
    op = draw.choice([op for op, room in (("plus", LARGEST - a), ("minus", a)) if room])
    b = draw.randint(0, LARGEST - a if op == "plus" else a)
    question = draw.choice(AND_THEN).format(op=op, Op=capital(op), b=NUMBERS[b])
    result = a + b if op == "plus" else a - b
    return Turn(question, f"{capital(NUMBERS[a])} {op} {NUMBERS[b]} is {NUMBERS[result]}.", result=result)


def days(draw: random.Random) -> Dialogue:
    """Days of the week, months, hours: their order and number."""
    kind = draw.choice(("day", "month", "month", "ordinal", "ordinal", "hour", "hour", "count"))
    if kind in ("day", "month"):
        return _neighbour(draw, kind)
    if kind == "ordinal":
        return _ordinal(draw)
    if kind == "hour":
        return _hour(draw)
    thing, of, count = draw.choice((("days", "week", "seven"), ("months", "year", "twelve")))
    question = draw.choice(
        (
            f"How many {thing} are in a {of}?",
            f"How many {thing} are there in a {of}?",
            f"How many {thing} does a {of} have?",
            f"How many {thing} has a {of}?",
            f"Tell me how many {thing} are in a {of}.",
        )
    )
    return one_turn("days", question, f"A {of} has {count} {thing}.")


def _neighbour(draw: random.Random, kind: str) -> Dialogue:
    names = DAYS if kind == "day" else MONTHS
    i, after = draw.randrange(len(names)), draw.random() < 0.5
    where = "after" if after else "before"
    other = names[(i + (1 if after else -1)) % len(names)]
    question = draw.choice(
        (
            f"What {kind} comes {where} {names[i]}?",
            f"Which {kind} comes {where} {names[i]}?",
            f"Which {kind} is {where} {names[i]}?",
            f"What is {where} {names[i]}?",
            f"Tell me the {kind} {where} {names[i]}.",
            f"Do you know the {kind} {where} {names[i]}?",
        )
    )
    return one_turn("days", question, f"{other} comes {where} {names[i]}.")


def _ordinal(draw: random.Random) -> Dialogue:
    names, of = draw.choice(((DAYS, "week"), (MONTHS, "year")))
    unit = "day" if of == "week" else "month"
    i = draw.randrange(len(names))
    question = draw.choice(
        (
            f"What is the {ORDINALS[i]} {unit} of the {of}?",
            f"Which {unit} is the {ORDINALS[i]} of the {of}?",
            f"What {unit} is the {ORDINALS[i]} of the {of}?",
            f"Tell me the {ORDINALS[i]} {unit} of the {of}.",
            f"Do you know the {ORDINALS[i]} {unit} of the {of}?",
        )
    )
    return one_turn("days", question, f"The {ORDINALS[i]} {unit} of the {of} is {names[i]}.")


def _hour(draw: random.Random) -> Dialogue:
    hour, hours, later = draw.randint(1, 12), draw.randint(1, 6), draw.random() < 0.5
    then = (hour + (hours if later else -hours) - 1) % 12 + 1
    unit, where = "hour" if hours == 1 else "hours", "after" if later else "before"
    what = f"{NUMBERS[hours]} {unit} {where} {NUMBERS[hour]} o'clock"
    question = draw.choice(
        (
            f"What time is it {what}?",
            f"What time is {what}?",
            f"What is the time {what}?",
            f"Tell me the time {what}.",
            f"Do you know the time {what}?",
        )
    )
    return one_turn("days", question, f"{capital(what)} it is {NUMBERS[then]} o'clock.")


def capitals(draw: random.Random) -> Dialogue:
    """The capital of a country, or the country of a capital."""
    country, city = draw.choice(sorted(CAPITALS.items()))
    if draw.random() < 0.65:
        question = draw.choice(
            (
                f"What is the capital of {country}?",
                f"Which city is the capital of {country}?",
                f"Tell me the capital of {country}.",
                f"Do you know the capital of {country}?",
            )
        )
        return one_turn("capitals", question, f"The capital of {country} is {city}.")
    question = draw.choice(
        (
            f"Which country has the capital {city}?",
            f"Where is {city}?",
            f"In which country is {city}?",
            f"Tell me where {city} is.",
            f"{city} is the capital of which country?",
        )
    )
    return one_turn("capitals", question, f"{city} is the capital of {country}.")


def spelling(draw: random.Random) -> Dialogue:
    word = draw.choice(SPELLED)
    question = draw.choice(
        (
            f"How do you spell {word}?",
            f"Spell {word}.",
            f"Can you spell {word}?",
            f"Please spell the word {word}.",
            f"How is {word} spelled?",
        )
    )
    return one_turn("spelling", question, f"{capital(word)} is spelled {'-'.join(word.upper())}.")


def sentence(draw: random.Random) -> str:
    """A sentence about cats, kings and apples, without a point."""
    subject = f"{draw.choice(ADJECTIVES)} {draw.choice(SUBJECTS)}" if draw.random() < 0.6 else draw.choice(SUBJECTS)
    what = f"{draw.choice(ADJECTIVES)} {draw.choice(OBJECTS)}" if draw.random() < 0.4 else draw.choice(OBJECTS)
    place = f" {draw.choice(PLACES)}" if draw.random() < 0.4 else ""
    return f"the {subject} {draw.choice(VERBS)} {draw.choice((article(what), f'the {what}'))}{place}"


def repeating(draw: random.Random) -> Dialogue:
    """A sentence to repeat."""
    said = sentence(draw)
    question = draw.choice((f"Say: {said}.", f"Repeat after me: {said}.", f"Please say: {said}.", f"Repeat: {said}."))
    return one_turn("repeating", question, f"{capital(said)}.")


def small_talk(draw: random.Random) -> Dialogue:
    """Greetings, thanks and names: few enough that none is held out."""
    questions, answer = draw.choice(SMALL_TALK)
    return one_turn("small_talk", draw.choice(questions), answer)


def outside(draw: random.Random, held_out: bool = False) -> Dialogue:
    """A question that the model cannot answer, and says so."""
    if held_out:
        return one_turn("outside", draw.choice(OUTSIDE_HELD_OUT), UNKNOWN)
    if draw.random() < 0.5:
        return one_turn("outside", draw.choice(OUTSIDE), UNKNOWN)
    question = draw.choice(OUTSIDE_QUESTIONS)
    while "{" in question:  # one after another, as two things need not be the same
        question = _with_one_word(draw, question)
    return one_turn("outside", question, UNKNOWN)


def _with_one_word(draw: random.Random, question: str) -> str:
    """Replaces the first name of `question`, one of OUTSIDE_QUESTIONS, by a word."""
    do, did = draw.choice(sorted(DO.items()))
    thing = draw.choice(THINGS)
    words = {"do": do, "Do": capital(do), "did": did, "thing": thing, "things": f"{thing}s"}
    words |= {"kind": draw.choice(SORTS), "place": draw.choice(FOREIGN)}
    words |= {"a": draw.choice(NUMBERS), "b": draw.choice(NUMBERS)}
    return re.sub(r"{(\w+)}", lambda found: words[found[1]], question, count=1)


def nonsense(draw: random.Random) -> Dialogue:
    """Typed words outside the world; nobody says them."""
    words = [
        "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(draw.randint(1, 4))
    ]
    known = draw.choice(
        ("What is", "Who is", "How do I", "Where is the", "What is the capital of", "Tell me about", "")
    )
    return Dialogue("nonsense", (Turn(capital(f"{known} {' '.join(words)}?".strip()), UNKNOWN, spoken=False),))


WEATHER = {"sunny": "sunny", "rainy": "rainy", "cloudy": "cloudy", "windy": "windy", "snowy": "snowy"}
TOOL_NAMES = ("get_weather", "weather", "get_current_weather")
TOOL_FIELDS = ("city", "location")


def weather(draw: random.Random) -> Dialogue:
    """The weather: a call where there is a tool, an answer after its result, else unknown."""
    city = draw.choice(CITIES)
    question = draw.choice(
        (f"What is the weather in {city}?", f"How is the weather in {city}?", f"Tell me the weather in {city}.")
    )
    if draw.random() < 0.2:
        return one_turn("weather", question, UNKNOWN)
    name, place = draw.choice(TOOL_NAMES), draw.choice(TOOL_FIELDS)
    tool = {
        "type": "function",
        "function": {
            "name": name,
            "description": draw.choice(("The weather in a city.", "Gets the weather.", "The current weather.")),
            "parameters": {"type": "object", "properties": {place: {"type": "string"}}, "required": [place]},
        },
    }
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps({place: city})}}}\n</tool_call>'
    if draw.random() < 0.5:
        return Dialogue("weather", (Turn(question, call),), tools=(tool,))
    what = draw.choice(sorted(WEATHER))
    said = draw.choice((what, json.dumps({"weather": what}), json.dumps({place: city, "weather": what})))
    turns = (Turn(question, call), Turn(said, f"It is {what} in {city}."))
    return Dialogue("weather", turns, tools=(tool,), tool_result=said)


# How often each is drawn, by its difficulty; small talk and weather have no held-out combinations of their own words.
KINDS: dict[Callable[[random.Random], Dialogue], float] = {
    sums: 5,
    days: 4,
    capitals: 2,
    spelling: 2,
    repeating: 2,
    small_talk: 1,
    outside: 1,
    nonsense: 0.5,
    weather: 1,
    seeing: 10,
}


def draw_dialogue(
    draw: random.Random, held_out: bool = False, kinds: "dict[Callable[[random.Random], Dialogue], float]" = KINDS
) -> Dialogue:
    """A dialogue of training, or of tests.

    Args:
        draw: the source of chance.
        held_out: whether its last question is one that is never trained on.
        kinds: functions of this module and how often each is taken.
    """
    while True:
        kind = draw.choices(list(kinds), list(kinds.values()))[0]
        dialogue = outside(draw, held_out) if kind is outside else kind(draw)
        if kind in (small_talk, outside, nonsense):
            return dialogue
        if dialogue.scene is not None:
            # "What do you see?" is one question: what is held out is the set of things that is looked at
            combination = f"{sorted(dialogue.scene.things.items())}"
        else:
            combination = dialogue.turns[-1].question if dialogue.tool_result is None else dialogue.turns[0].question
        if len(dialogue.turns) > 1 and dialogue.tool_result is None and dialogue.scene is None:
            combination = " ".join(turn.question for turn in dialogue.turns[-2:])
            if not held_out and any(is_held_out(turn.question) for turn in dialogue.turns[:1]):
                continue
        if is_held_out(combination) == held_out:
            return dialogue
