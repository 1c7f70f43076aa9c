"""Tables of what was simulated."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.simulation.costs import Costs


def costs_table(costs: Costs) -> Table:
    return _table(("constant", "value", "range", "unit", "source"), costs.rows())


def first_saturated(loads: Sequence[dict[str, Any]]) -> str:
    """The stage whose time to its first output grows most, in milliseconds, from the smallest to the largest load."""
    if len(loads) < 2:
        return ""
    least, most = (chosen(loads, key=lambda each: each["load"])["stages_p95_ms"] for chosen in (min, max))
    return max(most, key=lambda stage: most[stage] - least.get(stage, 0.0), default="")


def print_all(console: Console, figures: dict[str, Any]) -> None:
    console.print(f"Qwen3-Omni-30B-A3B on GPUs of {figures['gpu']}, {figures['cells']} cells")
    kinds = list(figures["a_cell"])
    rows = [
        (name, *(str(figures[key][kind]) for kind in kinds)) for name, key in (("a cell", "a_cell"), ("all", "all"))
    ]
    console.print(_table(("machines", *kinds), rows))
    loads = [*figures["loads"]]
    if "fullest_cell" in figures:
        loads.append({"load": "the fullest cell"} | figures["fullest_cell"])
    console.print(_table(_LOAD_HEADERS, (_load_row(load) for load in loads)))
    if figures["first_saturated"]:
        console.print(f"saturates first: {figures['first_saturated']}")
    if figures["faults"]:
        console.print(_table(_FAULT_HEADERS, (_fault_row(fault) for fault in figures["faults"])))
    console.print(
        _table(("shared by all cells", ""), ((name, f"{value:g}") for name, value in figures["shared"].items()))
    )
    console.print(f"as one cell, checks would take {figures['checks_without_cells']:.0%} of each gateway's core")


_STAGES = ("gateway", "thinker", "talker", "code2wav")
_LOAD_HEADERS = (
    *("load", "sessions", "turns", "TTFA ms p50", "p95", "refused %", "lost %", "gap > 100 ms %", "prompt computed %"),
    *(f"{stage} p95 ms" for stage in _STAGES),
)
_FAULT_HEADERS = (
    *("fault", "TTFA ms p50", "p95", "refused %", "lost %", "gap > 100 ms %", "tried again", "well again after s"),
    "where",
)


def _load_row(load: dict[str, Any]) -> Sequence[str]:
    stages = load["stages_p95_ms"]
    first = (str(load["load"]), str(load["sessions"]), str(load["turns"]))
    return (*first, *_quality(load), _percent(load["computed_share"]), *(f"{stages.get(s, 0):.0f}" for s in _STAGES))


def _fault_row(fault: dict[str, Any]) -> Sequence[str]:
    where = ", ".join(f"{what} {count}" for what, count in fault["where"].items())
    again_s = fault["well_again_s"]
    again = "not yet" if again_s is None else f"{again_s:.0f}"
    return (fault["fault"], *_quality(fault["after_fault"]), str(fault["retried"]), again, where)


def _quality(figures: dict[str, Any]) -> Sequence[str]:
    times = f"{figures['ttfa_p50_ms']:.0f}", f"{figures['ttfa_p95_ms']:.0f}"
    return (*times, *(_percent(figures[name]) for name in ("refused", "lost", "gaps")))


def _percent(share: float) -> str:
    return f"{100 * share:.2g}"


def _table(headers: Sequence[str], rows: Any) -> Table:
    table = Table()
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
