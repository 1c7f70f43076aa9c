"""What happened to the turns."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

BIN_S = 5.0
LATE_S = 1.0  # a first sound that is later than this is no answer in time
_LOST_SHARE = 0.01  # of a bin's turns, at which it is not well


@dataclass
class Bin:
    """The turns that began in BIN_S seconds, and have ended."""

    answered: int = 0
    refused: int = 0
    lost: int = 0
    gaps: int = 0
    first_s: list[float] = field(default_factory=list)

    @property
    def turns(self) -> int:
        return self.answered + self.refused + self.lost

    @property
    def is_well(self) -> bool:
        failed = self.refused + self.lost + sum(first > LATE_S for first in self.first_s)
        return failed <= _LOST_SHARE * max(1, self.turns)


class Results:
    """Attributes:
    started: turns, from the start on.
    retried: by the product's route.
    where: of refusals and losses: outcome and stage.
    computed, needed: prompt positions that thinkers computed, and that prompts had.
    times: seconds to the first output of a stage, from the arrival of its input; of a gateway to its calls.
    """

    def __init__(self) -> None:
        self.started = self.retried = self.finished = 0
        self.where = Counter[str]()
        self.computed = self.needed = 0.0
        self.times = defaultdict[str, list[float]](list)
        self._bins = dict[int, Bin]()

    def prefilled(self, positions: float, of: float) -> None:
        """Counts prompt positions that were computed, of those that the prompt has."""
        self.computed += positions
        self.needed += of

    def ended(self, began: float, outcome: str, where: str, first_s: float | None, has_gap: bool) -> None:
        self.finished += 1
        bin_ = self._bins.setdefault(int(began // BIN_S), Bin())
        setattr(bin_, outcome, getattr(bin_, outcome) + 1)
        bin_.gaps += has_gap
        if first_s is not None:
            bin_.first_s.append(first_s)
        if where:
            self.where[f"{outcome}: {where}"] += 1

    def between(self, begin_s: float, end_s: float) -> Bin:
        """Turns that began in this time."""
        return joined(bin_ for number, bin_ in self._bins.items() if begin_s <= number * BIN_S < end_s)

    def well_again_s(self, fault_s: float) -> float | None:
        """From a fault to the end of the last time that was not well; None: it was not well at the end either."""
        after = sorted(number for number in self._bins if (number + 1) * BIN_S > fault_s)
        bad = [number for number in after if not self._bins[number].is_well]
        if not bad:
            return 0.0
        return None if bad[-1] == after[-1] else (bad[-1] + 1) * BIN_S - fault_s


def joined(bins: Iterable[Bin]) -> Bin:
    """Several as one."""
    whole = Bin()
    for bin_ in bins:
        whole.answered += bin_.answered
        whole.refused += bin_.refused
        whole.lost += bin_.lost
        whole.gaps += bin_.gaps
        whole.first_s += bin_.first_s
    return whole


def quantile(values: Iterable[float], share: float) -> float:
    """NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def figures(bin_: Bin) -> dict[str, Any]:
    """Of the turns of a time; shares of the turns."""
    turns = max(1, bin_.turns)
    return {
        "turns": bin_.turns,
        "ttfa_p50_ms": round(quantile(bin_.first_s, 0.5) * 1000, 1),
        "ttfa_p95_ms": round(quantile(bin_.first_s, 0.95) * 1000, 1),
        "refused": round(bin_.refused / turns, 5),
        "lost": round(bin_.lost / turns, 5),
        "gaps": round(bin_.gaps / turns, 5),
    }
