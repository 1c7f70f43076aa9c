"""A conversation in numbers."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cli.talking.dialogue import Dialogue


@dataclass
class TurnTiming:
    """A turn and its answer, in seconds of one clock.

    Attributes:
        said_s: when the user's last sample was sent; None: nothing was said.
        answered_s: when the answer's first sound, or text if it has none, arrived.
    """

    number: int
    said_s: float | None
    answered_s: float | None = None

    @property
    def latency_s(self) -> float | None:
        return None if self.answered_s is None or self.said_s is None else self.answered_s - self.said_s


@dataclass
class Tokens:
    """Token counts of all answers."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("input", "cached", "output"), 0))

    def add(self, usage: Mapping[str, Any]) -> None:
        self.counts["input"] += usage.get("input_tokens", 0)
        self.counts["cached"] += (usage.get("input_token_details") or {}).get("cached_tokens", 0)
        self.counts["output"] += usage.get("output_tokens", 0)


def lines(dialogue: "Dialogue") -> Iterator[str]:
    turns, cuts = len(dialogue.turns), dialogue.interruptions
    cut = f", {cuts} interruption{'s' * (cuts != 1)}" if cuts else ""
    yield f"{turns} turn{'s' * (turns != 1)}{cut}"
    known = sorted(turn.latency_s for turn in dialogue.turns if turn.latency_s is not None)
    if known:
        median = statistics.median(known)
        yield f"first {dialogue.first} after {median:.2f} s (median; {known[0]:.2f} to {known[-1]:.2f} s)"
    count = dialogue.tokens.counts
    if any(count.values()):
        yield f"tokens: {count['input']} in, of them {count['cached']} cached; {count['output']} out"
