"""Charts of the benchmark: first sound, audio a second, and gaps."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.traffic.figures import Figures
from benchmarks.traffic.report import Load

QUARTET, PEER = "#1b6ca8", "#b8b8b8"


def draw(loads: Sequence[Load], first_audio_ms: dict[str, list[float]], gaps_ms: list[float], file: Path) -> None:
    """Writes PNG, SVG or whatever the name's suffix says.

    Args:
        loads: all loads of the run.
        first_audio_ms: TTFA of each stream, by the line's label; those of transformers begin with its name.
        gaps_ms: longest gap of each stream of the open loop, or of the largest closed loop if there was none.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, (first, amount, gap) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for label, values_ms in first_audio_ms.items():
        is_peer = label.startswith("transformers")
        style = ":" if " 1 at" in label else "-"
        first.plot(*_cumulative(values_ms), style, color=PEER if is_peer else QUARTET, label=label)
    first.set(title="time to first audio", xscale="log", xlabel="ms", ylabel="share of streams", ylim=(0, 1))
    first.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)

    closed = [load for load in loads if load.concurrency is not None]
    places = np.arange(len(closed))
    sides: dict[str, tuple[str, list[Figures | None]]] = {"Quartet": (QUARTET, [load.quartet for load in closed])}
    if any(load.peer for load in closed):
        sides["transformers"] = (PEER, [load.peer for load in closed])
    width = 0.8 / len(sides)
    for number, (label, (color, figures)) in enumerate(sides.items()):
        heights = [each.audio_s_per_s if each else 0.0 for each in figures]
        bars = amount.bar(places + number * width, heights, width, color=color, label=label)
        amount.bar_label(bars, fmt="%.1f", fontsize=8)
    amount.set_xticks(places + width * (len(sides) - 1) / 2, [f"{load.concurrency} at a time" for load in closed])
    amount.set(title="seconds of audio a second")
    amount.legend(fontsize=8)

    rate = next((load.rate_per_s for load in loads if load.rate_per_s), None)
    load_name = f"Poisson arrivals, {rate:.2f} a second" if rate else f"{closed[-1].concurrency} at a time"
    gap.plot(*_cumulative(gaps_ms), color=QUARTET)
    gap.axvline(100, color="#c03030", linewidth=1, label="100 ms")
    gap.set(title=f"longest gap of a stream\n({load_name})", xlabel="ms", ylabel="share of streams", ylim=(0, 1.02))
    gap.set_xlim(0, max(120.0, max(gaps_ms) * 1.05))
    gap.legend(fontsize=8)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _cumulative(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Points of the share of `values` up to each of them."""
    ordered = np.sort(np.asarray(values, dtype=float))
    return np.repeat(ordered, 2), np.repeat(np.arange(len(ordered) + 1), 2)[1:-1] / len(ordered)
