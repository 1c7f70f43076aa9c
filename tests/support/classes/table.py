"""The table of all classes, as a page of the documents."""

import re
from collections import Counter
from collections.abc import Sequence

import diffusers

from tests.support.classes.judging import Verdict

_HEAD = """# Every pipeline class of diffusers

What becomes of each pipeline class that diffusers {version} exports. `scripts/diffusers_classes.py` made this page: the
tests of diffusers make a tiny random checkpoint of a class, and the dit serves it on a CPU, in float32.

- **served**: two requests of different prompts, seeds and numbers of steps give what plain diffusers gives for the same
  arguments, every value equal. Made in turns, each a model's call, they give the same again.
- **served, one at a time**: alone they are equal. In turns they are not, or fail, which the stage finds out at its
  start.
- **needs**: no request can ask for it. The stage says so before it reads weights.
- **fails**: it was tried, and why it was not served. "Plain diffusers" and "the test" fail without Quartet, too: most
  tests want files that only a hub has, and stand-ins are in their place; Cosmos has no guardrail. Matrices of zeros,
  with which training begins, get small values.
- **not tried**: diffusers has no test that makes a tiny checkpoint of it.

A tiny checkpoint says nothing of speed, memory and quality. No class was tried on a GPU, in bfloat16, with adapters or
offloading. Which classes share steps the stage finds out at its start ([any-model.md](any-model.md#what-is-checked));
for this table they share none.

{sums}

| class | makes | needs | result |
|---|---|---|---|
{rows}
"""


def written(verdicts: Sequence[Verdict]) -> str:
    """The page."""
    return _HEAD.format(version=diffusers.__version__, sums=_sums(verdicts), rows="\n".join(map(row, verdicts)))


def row(verdict: Verdict) -> str:
    """A class's line in the table."""
    result = {"served": "served", "one at a time": "served, one at a time"}.get(
        verdict.result, f"{verdict.result}: {_clause(verdict.why)}" if verdict.result != "needs" else verdict.why
    )
    return f"| {verdict.name} | {verdict.makes} | {verdict.needs or '-'} | {result} |"


def _clause(text: str) -> str:
    """Without what a table or a link would be made of."""
    return re.sub(r"[|\[\]<>*_`{}]", lambda match: f"\\{match[0]}", text)


def _sums(verdicts: Sequence[Verdict]) -> str:
    counted = Counter(each.result for each in verdicts)
    asked = [each for each in verdicts if each.result != "needs"]
    tried = [each for each in asked if each.result != "not tried"]
    lines = [
        ("exported", len(verdicts)),
        ("no request can ask for", counted["needs"]),
        ("can be asked for by a prompt, images, a mask, control images, a video and a class", len(asked)),
        ("of these tried", len(tried)),
        ("served", counted["served"] + counted["one at a time"]),
        ("of these one at a time", counted["one at a time"]),
    ]
    return "\n".join(["| classes | |", "|---|---|", *(f"| {what} | {number} |" for what, number in lines)])
