"""A conversation in numbers."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.talking.dialogue import Dialogue


@dataclass
class TurnTiming:
    """A turn and its answer, in seconds of one clock.

    Attributes:
        said_s: when the user's last sample was sent.
        answered_s: when the answer's first sound arrived, or text if it has none.
    """

    said_s: float | None
    answered_s: float | None = None

    @property
    def latency_s(self) -> float | None:
        return None if self.answered_s is None or self.said_s is None else self.answered_s - self.said_s


def lines(dialogue: "Dialogue") -> Iterator[str]:
    turns, cuts = len(dialogue.turns), dialogue.interruptions
    cut = f", {cuts} interruption{'s' * (cuts != 1)}" if cuts else ""
    yield f"{turns} turn{'s' * (turns != 1)}{cut}"
    known = sorted(turn.latency_s for turn in dialogue.turns if turn.latency_s is not None)
    if known:
        median = statistics.median(known)
        yield f"first {dialogue.first} after {median:.2f} s (median; {known[0]:.2f} to {known[-1]:.2f} s)"
    count = dialogue.tokens
    if count.total():
        yield f"tokens: {count['input']} in, of them {count['cached']} cached; {count['output']} out"
