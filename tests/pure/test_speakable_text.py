"""What of a Markdown text is for the ear, however it is cut into pieces."""

import random
import time

import pytest

from gateway.pipeline.speakable_text import SpeakableText

CASES = {
    "Plain words, as they are.": "Plain words, as they are.",
    "# A title\n\nText below.": "A title\n\nText below.",
    "A **bold** word and *another*, __both__ and _so on_, ~~gone~~.": "A bold word and another, both and so on, gone.",
    "***All of it***": "All of it",
    "**Un**believable": "Unbelievable",
    "snake_case, 2*3 = 6, and 3 * 4 = 12": "snake_case, 2*3 = 6, and 3 * 4 = 12",
    "\\*not a mark\\*": "*not a mark*",
    "- one\n* two\n+ three\n  - [x] four": "one\ntwo\nthree\nfour",
    "1. first\n2. second": "1. first\n2. second",
    "-5 degrees, +3 more": "-5 degrees, +3 more",
    "> A quotation\n> > within": "A quotation\nwithin",
    'See [the manual](https://example.com/a_b(c)d "Title"), page 3.': "See the manual, page 3.",
    "See [the **whole** text][1] or ![a red boat](boat.png).": "See the whole text or a red boat.",
    "Look at https://example.com/a?b=c_d, then go on.": "Look at , then go on.",
    "Or <https://example.com> and www.example.com.": "Or and .",
    "A note[^1] here.": "A note here.",
    "Call `len(x)` now.": "Call len(x) now.",
    "Code:\n```python\nprint('**no**')\n```\nAfter it.": "Code:\nAfter it.",
    "~~~~\n~~~\nstill code\n~~~~\nAfter.": "After.",
    "No end:\n```\nx = 1": "No end:\n",
    "Great 🎉👨‍👩‍👧 work 👍🏽 and ☀️!": "Great work and !",
    "Press 1️⃣ now": "Press 1 now",
    'A<br>line and <b class="x">bold</b>, 3 < 4 > 2': "Aline and bold, 3 < 4 > 2",
    "Above\n\n---\n\nBelow\n***\nEnd": "Above\n\n\nBelow\nEnd",
    "| Boat | Colour |\n|:---|---:|\n| Ada | **red** |\n": "Boat, Colour\nAda, red\n",
    "重要なのは**赤い船**です。はい。": "重要なのは赤い船です。はい。",
    "[not a link] and (neither)": "[not a link] and (neither)",
    "می‌خواهم": "می‌خواهم",
}


def said(pieces: list[str]) -> str:
    speakable = SpeakableText()
    return "".join([*map(speakable.add, pieces), speakable.close()])


@pytest.mark.parametrize(("written", "spoken"), CASES.items())
def test_what_is_said(written: str, spoken: str) -> None:
    assert said([written]) == spoken
    draw = random.Random(written)
    for _ in range(20):
        cuts = sorted(draw.sample(range(len(written) + 1), min(len(written), draw.randint(1, 8))))
        pieces = [written[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(written)], strict=True)]
        assert said(pieces) == spoken, pieces
    assert said(list(written)) == spoken


def test_a_word_is_said_when_the_next_begins() -> None:
    speakable = SpeakableText()
    assert [speakable.add(piece) for piece in ("- The ", "**red", "** boat", " is")] == ["The ", "", "red ", "boat "]
    assert speakable.add(" [far") == "is "
    assert speakable.add(" away](http://a.b/c") == ""
    assert speakable.add(") now") == "far away "
    assert speakable.close() == "now"


def test_without_blanks_a_character_is_said_at_once() -> None:
    speakable = SpeakableText()
    assert [speakable.add(piece) for piece in ("船は", "赤い。", "x")] == ["船は", "赤い。", ""]


@pytest.mark.parametrize(
    "piece", ["[", "![", "<a ", "`", "|", "*", "_", "> ", "- ", "~", "#", "(", "\\", "[](", '"', "-|"]
)
def test_what_never_ends_is_said_and_costs_little(piece: str) -> None:
    """Nothing is held for ever, and no expression takes more than linear time: a minute here would be one that does."""
    began = time.monotonic()
    assert said([piece] * 5000) is not None
    assert said([piece * 50_000 + "a"]) is not None
    assert said([f"a{piece}"] * 5000)
    assert time.monotonic() - began < 60
