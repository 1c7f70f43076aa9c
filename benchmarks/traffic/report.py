"""The benchmark's tables: each load with Quartet beside its peers, and where the time went."""

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from benchmarks.traffic.figures import PERCENTILES, PHASES, WAITS, Figures
from benchmarks.traffic.player import AUDIBLE_GAP_MS

# Title and decimals of every figure with percentiles.
SPREADS = {
    "ttft_ms": ("TTFT ms", 1),
    "ttfa_ms": ("TTFA ms", 1),
    "itl_ms": ("ITL ms", 1),
    "tpot_ms": ("TPOT ms", 1),
    "total_ms": ("total ms", 0),
    "rtf": ("RTF", 3),
    "longest_gap_ms": ("longest gap ms", 0),
}
_LEAST = 0.05  # what is shown as 0.0 has no ratio
_OF_TEXT = {"ttft_ms", "itl_ms", "tpot_ms"}
# Title, and whether more is better.
TOTALS = {"audio_s_per_s": ("audio s/s", True), "cpu_s": ("CPU s a request", False)}


@dataclass(frozen=True)
class Recorded:
    """Figures that another server gave on another day on such a machine: p50 by figure."""

    name: str
    by_concurrency: dict[int, dict[str, float]]


# Measured by hand on a machine of the same kind (2 cores): its 3 M parameter checkpoint in float32.
VLLM_OMNI = Recorded(
    "vLLM-Omni (recorded)",
    {
        1: {"ttft_ms": 20.0, "ttfa_ms": 225.0, "audio_s_per_s": 3.9, "cpu_s": 1.33},
        8: {"ttft_ms": 65.0, "ttfa_ms": 450.0, "audio_s_per_s": 13.6, "cpu_s": 0.48},
    },
)


@dataclass
class Load:
    """A load, and what came of it on each side.

    Attributes:
        title: says what was done.
        concurrency: workers of the closed loop; None for an open loop.
        rate_per_s: of arrivals; None for a closed loop.
        quartet: figures of the gateway.
        peer: of the same requests one after another elsewhere; None if it was not asked.
        peer_name: who answered them.
        third: p50 by figure of a third side: another server under the same load on another day, or the peer when it is
            given all requests in one call.
        third_name: what that is.
    """

    title: str
    concurrency: int | None
    rate_per_s: float | None
    quartet: Figures
    peer: Figures | None = None
    peer_name: str = "transformers"
    third: dict[str, float] = field(default_factory=dict)
    third_name: str = ""


def show(console: Console, loads: list[Load]) -> None:
    """Prints everything."""
    for load in loads:
        console.print(f"[bold]{load.title}[/bold]")
        console.print(_comparison(load))
        console.print(_footnote(load), highlight=False)
    if any(load.quartet.stages for load in loads):
        console.print("[bold]where a request's time went[/bold] (p50 in ms, the stages' own account)")
        console.print(_stages(loads))


def _comparison(load: Load) -> Table:
    table = Table()
    percentiles = " / ".join(f"p{p}" for p in PERCENTILES)
    table.add_column("figure")
    for name in ["Quartet", *([load.peer_name] if load.peer else [])]:
        table.add_column(f"{name}\n{percentiles}", justify="right")
    if load.peer:
        table.add_column("times\nbetter", justify="right")
    if load.third:
        table.add_column(f"{load.third_name}\np50", justify="right")
        table.add_column("times\nbetter", justify="right")
    sides = [load.quartet, *([load.peer] if load.peer else [])]
    for name, (title, digits) in SPREADS.items():
        if name in _OF_TEXT and not any(side.spreads[name]["p99"] for side in sides):
            continue  # of sound without text
        cells = [" / ".join(f"{side.spreads[name][f'p{p}']:.{digits}f}" for p in PERCENTILES) for side in sides]
        p50 = [side.spreads[name]["p50"] for side in sides]
        table.add_row(title, *cells, *_ratios(load, name, p50, more_is_better=False))
    table.add_section()
    for name, (title, more_is_better) in TOTALS.items():
        values = [getattr(side, name) for side in sides]
        cells = ["not known" if value is None else f"{value:.2f}" for value in values]
        table.add_row(title, *cells, *_ratios(load, name, values, more_is_better))
    return table


def _ratios(load: Load, name: str, sides: list, more_is_better: bool) -> list[str]:
    """The cells right of the values: how many times better Quartet, first of `sides`, is than each peer."""
    cells = [_times_better(sides[0], sides[1], more_is_better)] if load.peer else []
    if load.third:
        third = load.third.get(name)
        shown = f"{third:.4g}" if third else ""
        cells += [shown, _times_better(sides[0], third, more_is_better)]
    return cells


def _times_better(ours: float | None, theirs: float | None, more_is_better: bool) -> str:
    if not theirs or not ours or ours < _LEAST:
        return ""
    return f"{ours / theirs if more_is_better else theirs / ours:.2f}"


def _footnote(load: Load) -> str:
    ours = load.quartet
    frames = f", {ours.frames_per_s:.1f} codec frames" if ours.frames_per_s else ""  # not told with plain samples
    lines = [
        f"{ours.requests} requests answered, {ours.failed} failed, {ours.silent} without audio; "
        f"{ours.requests_per_s:.2f} requests a second{frames}; "
        f"{ours.gap_free_share:.0%} of streams without a gap over {AUDIBLE_GAP_MS:g} ms"
    ]
    if speeds := [f"{stage} {speed:.0f}" for stage, speed in ours.stage_frames_per_s.items()]:
        lines.append(f"frames a second of one stream while its stage does not wait (p50): {', '.join(speeds)}")
    if ours.cpu_s_per_request:
        client = f"; the load generator took {ours.client_cpu_s_per_request:.3f} more"
        lines.append("CPU s a request: " + _by_name(ours.cpu_s_per_request, 3) + client)
        lines.append("memory MiB: " + _by_name(ours.memory_mib, 0))
    lines += [f"error: {error}" for error in ours.errors]
    return "\n".join(lines) + "\n"


def _by_name(values: dict[str, float], digits: int) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())


def _stages(loads: list[Load]) -> Table:
    """Where a request's time went, by stage."""
    table = Table()
    for title in ("load", "stage"):
        table.add_column(title)
    for phase in (*PHASES, "waited_ms"):
        table.add_column(phase.removesuffix("_ms").replace("_", " "), justify="right")
    for load in loads:
        for stage, phases in load.quartet.stages.items():
            waited = f"{phases[WAITS[stage]]:.1f}" if stage in WAITS else ""
            name = "open loop" if load.concurrency is None else f"{load.concurrency} at a time"
            table.add_row(name, stage, *(f"{phases[phase]:.1f}" for phase in PHASES), waited)
        table.add_section()
    return table
