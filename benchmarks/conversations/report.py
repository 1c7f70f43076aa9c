"""The tables of realtime.py."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.conversations.barge_in import Silences
from benchmarks.conversations.crowd import Crowd
from benchmarks.conversations.first_sound import Turn
from benchmarks.conversations.hearing import Cost

SIDES = ("speculation off", "speculation on", "chat, whole turns")


@dataclass
class Speculations:
    """What the gateway says of them."""

    used: float = 0.0
    wasted: float = 0.0
    saved_ms: float | None = None


@dataclass
class Report:
    """All that was measured.

    Attributes:
        turns: by number of sessions, by side.
        speculations: by number of sessions.
        silences: of barge-in.
        barging: sessions of it.
        detector_ms: CPU milliseconds of the detector for a second of one session's sound.
        cost: of a gateway that listens.
        crowds: by transport.
    """

    turns: dict[int, dict[str, list[Turn]]] = field(default_factory=dict)
    speculations: dict[int, Speculations] = field(default_factory=dict)
    silences: Silences | None = None
    barging: int = 0
    detector_ms: float | None = None
    cost: Cost | None = None
    crowds: dict[str, Crowd] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        """Errors of turns, and of sessions that were lost."""
        crowds = [f"{name}: {crowd.lost} sessions lost" for name, crowd in self.crowds.items() if crowd.lost]
        crowds += [error for crowd in self.crowds.values() for error in crowd.errors]
        return crowds + [
            turn.error for sides in self.turns.values() for turns in sides.values() for turn in turns if turn.error
        ]

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


def show(console: Console, report: Report) -> None:
    """Prints everything."""
    if report.turns:
        console.print("[bold]from the user's last sample, ms, p50 / p90[/bold]")
        console.print(_first_sounds(report))
        for sessions, told in report.speculations.items():
            saved = "" if told.saved_ms is None else f"; those used saved {told.saved_ms:.0f} ms each"
            console.print(f"{sessions} sessions: {told.used:.0f} speculations used, {told.wasted:.0f} wasted{saved}")
        for error in sorted(set(report.failed)):
            console.print(f"error: {error}", highlight=False)
    if report.silences is not None:
        _show_silences(console, report.silences, report.barging)
    if report.detector_ms is not None:
        console.print(f"detector alone: {report.detector_ms:.2f} ms of CPU time for a second of a session's sound")
    if (cost := report.cost) is not None:
        gateway, loop, detector = (
            1000 * each / (cost.sessions * cost.wall_s) for each in (cost.cpu_s, cost.loop_s, cost.detector_s)
        )
        console.print(
            f"{cost.sessions} sessions that send sound, {cost.wall_s:.0f} s: the gateway takes "
            f"{cost.cpu_s / cost.wall_s:.0%} of a core, {gateway:.2f} ms for a second of a session's sound, of which "
            f"its event loop {loop:.2f}, the detector {detector:.2f}; the client took {cost.client_s / cost.wall_s:.0%}"
        )


def _first_sounds(report: Report) -> Table:
    table = Table()
    for title in ("sessions", "side", "turns", "failed", "decided", "first sound", "from decision to sound", "times"):
        table.add_column(title, justify="left" if title == "side" else "right")
    for sessions, sides in report.turns.items():
        peer = _median(sides[SIDES[-1]])
        for side, turns in sides.items():
            good = [turn for turn in turns if turn.error is None]
            own = _median(turns)
            table.add_row(
                str(sessions),
                side,
                str(len(good)),
                str(len(turns) - len(good)),
                spread([turn.stopped_s for turn in good]),
                spread([turn.first_audio_s for turn in good]),
                spread([turn.first_audio_s - turn.stopped_s for turn in good]),
                f"{peer / own:.2f}" if own and peer else "",
            )
        table.add_section()
    return table


def _median(turns: Sequence[Turn]) -> float:
    good = [turn.first_audio_s for turn in turns if turn.error is None]
    return float(np.median(good)) if good else 0.0


def _show_silences(console: Console, silences: Silences, sessions: int) -> None:
    console.print(f"[bold]from speech_started, ms, p50 / p99[/bold]: {sessions} sessions, whose answers do not end")
    many = f"{len(silences.sound_s)} answers interrupted"
    console.print(f"last sound of the answer: {spread(silences.sound_s, 99)}; {many}")
    console.print(f"response.done: {spread(silences.done_s, 99)}")
    if silences.idle_s:
        times = f"{len(silences.idle_s)} times all at once"
        console.print(f"all stages idle: {spread(silences.idle_s, 99)}; {times}")


def spread(seconds: Sequence[float], percentile: int = 90) -> str:
    """Milliseconds: p50 and another."""
    if not seconds:
        return ""
    low, high = (1000 * float(np.percentile(seconds, p, method="higher")) for p in (50, percentile))
    return f"{low:.0f} / {high:.0f}"
