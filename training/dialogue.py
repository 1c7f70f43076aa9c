"""What a dialogue is, and which ones are for tests alone."""

import hashlib
import re
from dataclasses import dataclass, field

from PIL.Image import Image

from training.pictures import Scene

HELD_OUT_SHARE = 5  # every fifth combination


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        question: of the user, or what a tool said.
        answer: text, or a call of a tool.
        spoken: whether people would say it aloud.
        result: the number it came to.
        by_tool: whether a tool says the question.
        shown: a picture that the tool made, after what it says.
    """

    question: str
    answer: str
    spoken: bool = True
    result: int | None = None
    by_tool: bool = False
    shown: Image | None = None


@dataclass(frozen=True)
class Dialogue:
    """Turns, the picture that stands before the first of them, and the tools of the request.

    Attributes:
        kind: the function that drew it.
        turns: at least one; the last one's answer is what is trained on and asked for, those before are history.
        picture: None where there is none.
        tools: JSON schemas of functions, as in a request.
        tool_result: what the tool said, in a message between the last turn's call and its answer.
    """

    kind: str
    turns: tuple[Turn, ...]
    picture: Scene | None = None
    tools: tuple[dict, ...] = ()
    tool_result: str | None = field(default=None)


def is_held_out(text: str) -> bool:
    """Whether `text` is for tests alone."""
    return hashlib.blake2b(text.lower().encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def capital(text: str) -> str:
    """`text` with its first letter as a capital."""
    return text[:1].upper() + text[1:]


def split_question(text: str) -> list[str]:
    """The words of `text`, in lower case."""
    return re.findall(r"[a-z']+", text.lower())


def article(word: str) -> str:
    """`word` after "a" or "an"."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def one_turn(kind: str, question: str, answer: str) -> Dialogue:
    """A question and its answer."""
    return Dialogue(kind, (Turn(question, answer),))
