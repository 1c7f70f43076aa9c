"""Dialogues, and the rule that holds some of them out for tests."""

import hashlib
import re
from dataclasses import dataclass, field

from training.scenes import Picture, Scene

HELD_OUT_SHARE = 5  # every fifth combination


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        question: the user's, or a tool's result.
        answer: text, or a tool call.
        spoken: whether people would say it aloud.
        result: the number it came to.
        by_tool: whether the question is a tool's result.
        shown: the image that comes with it: a tool's after its text, a user's before.
    """

    question: str
    answer: str
    spoken: bool = True
    result: int | None = None
    by_tool: bool = False
    shown: Picture | None = None


@dataclass(frozen=True)
class Dialogue:
    """Turns, with an image before the first and the request's tools.

    Attributes:
        kind: the function that drew it.
        turns: at least one; the last answer is the target, those before are history.
        tools: JSON schemas of functions, as in a request.
        tool_result: the tool message between the last turn's call and its answer.
    """

    kind: str
    turns: tuple[Turn, ...]
    scene: Scene | None = None
    tools: tuple[dict, ...] = ()
    tool_result: str | None = field(default=None)


def is_held_out(text: str) -> bool:
    """Returns whether `text` is for tests alone."""
    return hashlib.blake2b(text.lower().encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def split_question(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def one_turn(kind: str, question: str, answer: str) -> Dialogue:
    return Dialogue(kind, (Turn(question, answer),))
