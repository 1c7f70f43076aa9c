"""The table of crowd.py."""

from collections.abc import Mapping

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.conversations.crowd import Crowd, Wait
from benchmarks.conversations.report import spread
from benchmarks.traffic.player import AUDIBLE_GAP_MS


def show_crowds(console: Console, crowds: Mapping[str, Crowd]) -> None:
    """Prints what the users of each transport heard."""
    table = Table()
    for title in ("transport", "open", "speak", "turns", "failed", "lost", "first sound", "by session", "underruns"):
        table.add_column(title, justify="left" if title == "transport" else "right")
    table.add_column("late ms", justify="right")
    table.add_column("gap-free", justify="right")
    for transport, crowd in crowds.items():
        good = [[wait for wait in waits if wait.error is None] for waits in crowd.users]
        waits = [wait for user in good for wait in user]
        gaps_s = [gap_ms / 1000 for wait in waits for gap_ms in wait.gaps_ms]
        smooth = [max(wait.gaps_ms, default=0.0) <= AUDIBLE_GAP_MS for wait in waits]
        table.add_row(
            transport,
            str(crowd.sessions),
            str(len(crowd.users)),
            str(len(waits)),
            str(len(crowd.errors)),
            str(crowd.lost),
            spread([wait.first_sound_s for wait in waits], 95),
            _of_sessions(good),
            str(len(gaps_s)),
            spread(gaps_s, 95),
            f"{np.mean(smooth):.0%}" if smooth else "",
        )
    console.print("[bold]a crowd: from the user's last sample to the first sound, ms, p50 / p95[/bold]")
    console.print(table)
    for transport, crowd in crowds.items():
        median, late = ("-" if each is None else f"{1000 * each:.0f}" for each in crowd.told_s)
        console.print(
            f"{transport}: the gateway's metrics say {median} / {late} ms, {crowd.told_underruns:.0f} underruns; "
            f"it takes {crowd.idle_cpu:.1%} of a core while all wait and send {crowd.quiet}, {crowd.speaking_cpu:.0%} "
            f"while users speak, and {crowd.session_kib:.0f} KiB a session that waits",
            highlight=False,
        )
        for error in sorted(set(crowd.errors)):
            console.print(f"error: {transport}: {error}", highlight=False)


def _of_sessions(users: list[list[Wait]]) -> str:
    """The least and the greatest of the sessions' own medians."""
    medians = [1000 * float(np.median([wait.first_sound_s for wait in waits])) for waits in users if waits]
    return f"{min(medians):.0f} to {max(medians):.0f}" if medians else ""
