"""The table of dit.py: every side beside diffusers one after another."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.diffusion.work import Turn

FIGURES = ("seconds", "first_s", "step_ms", "cpu_s", "mean_batch")


@dataclass
class Row:
    """One side under one load.

    Attributes:
        title: which.
        is_quartet: or diffusers.
        turns: of every round.
        apart: most steps of 8 bit pixels, or of PCM16, between its outputs and those of diffusers one after another.
    """

    title: str
    is_quartet: bool
    turns: list[Turn] = field(default_factory=list)
    apart: int = 0

    def medians(self) -> dict[str, float]:
        """Of the rounds."""
        return {name: median(getattr(turn, name) for turn in self.turns) for name in FIGURES}


@dataclass
class Result:
    """A checkpoint with all its rows; the first is diffusers one after another."""

    title: str
    outputs: int
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        """All figures of all rounds."""
        return {
            "title": self.title,
            "outputs": self.outputs,
            "rows": [
                {
                    "title": row.title,
                    "apart": row.apart,
                    "medians": row.medians(),
                    "ratio": self.ratio(row),
                    "rounds": [{name: getattr(turn, name) for name in FIGURES} for turn in row.turns],
                }
                for row in self.rows
            ],
        }

    def ratio(self, row: Row) -> float:
        """How many times faster than diffusers one after another."""
        return self.rows[0].medians()["seconds"] / row.medians()["seconds"]

    def table(self, most_apart: int) -> Table:
        """Medians of rounds."""
        shown = Table()
        shown.add_column("side")
        for title in ("s for all", "outputs/s", "times", "first s", "step ms", "CPU s an\noutput", "mean\nbatch"):
            shown.add_column(title, justify="right")
        shown.add_column("outputs")
        for number, row in enumerate(self.rows):
            values = row.medians()
            shown.add_row(
                row.title,
                f"{values['seconds']:.3f}",
                f"{self.outputs / values['seconds']:.2f}",
                f"{self.ratio(row):.2f}",
                f"{values['first_s']:.3f}",
                f"{values['step_ms']:.2f}" if values["step_ms"] else "",
                f"{values['cpu_s']:.3f}",
                f"{values['mean_batch']:.2f}",
                _agreement(row.apart, most_apart) if number else "",
                end_section=number + 1 < len(self.rows) and self.rows[number + 1].is_quartet != row.is_quartet,
            )
        return shown


def _agreement(apart: int, most_apart: int) -> str:
    if apart <= most_apart:
        return "the same" if not apart else f"the same, to {apart}"
    return f"NOT EXACT: {apart} apart"
