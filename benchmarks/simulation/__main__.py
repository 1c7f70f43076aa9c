"""Simulates spoken conversations of Qwen3-Omni-30B-A3B on GPUs: how many machines, what saturates first, what a fault
costs. Routing, retries and admission are the gateway's own code; time, engines and networks are simulated.

    python -m benchmarks.simulation --sessions 1000 --loads 0.5 1 1.5 --faults zone
"""

import argparse
import json
import logging
import math
import sys
import time
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from benchmarks.simulation import report
from benchmarks.simulation.cell import Counts
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.faults import WHATS, Fault
from benchmarks.simulation.gpus import NAMES, Gpu
from benchmarks.simulation.sizing import for_a_lost_zone, size
from benchmarks.simulation.whole import Load, run, sessions_of_cells, shared, without_cells

console = Console(width=140, soft_wrap=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000, help="conversations at a time, in all cells")
    parser.add_argument("--cell", type=int, default=10_000, help="most of them in a cell, on average")
    parser.add_argument("--gpu", choices=NAMES, default="h200")
    parser.add_argument("--realtime", action="store_true", help="open microphones; default: a request a turn")
    parser.add_argument("--counts", help="thinkers,talkers,code2wavs,gateways of a cell; default: by arithmetic")
    parser.add_argument("--spare-zone", action="store_true", help="so many that two of three zones are enough")
    parser.add_argument("--loads", type=float, nargs="*", default=[1.0], help="times the sessions, on these machines")
    parser.add_argument("--faults", nargs="*", choices=WHATS, default=[], help="each in a run of its own")
    parser.add_argument("--away-s", type=float, default=30.0, help="until a lost zone's machines begin to start")
    parser.add_argument("--fault-seconds", type=float, default=60.0, help="from a fault to the end of its run")
    parser.add_argument("--warm-up-s", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="simulated, after the warm-up")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cost", action="append", default=[], metavar="NAME=VALUE", help="another value")
    parser.add_argument("--ends", choices=["low", "high"], help="all uncertain costs at this end of their range")
    parser.add_argument("--costs", action="store_true", help="print all constants with unit, range and source, and end")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args(arguments)
    for name in ("sessions", "cell", "seconds"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name}: must be above 0")
    try:
        options.cost = dict(_pair(each) for each in options.cost)
        costs = Costs() if options.ends is None else Costs().at(options.ends)
        options.values = costs.with_values(**options.cost)
        options.counts = None if options.counts is None else _counts(options.counts)
    except ValueError as error:
        parser.error(str(error))
    return options


def _pair(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"--cost {text}: write NAME=VALUE with a number") from None


def _counts(text: str) -> Counts:
    parts = text.split(",")
    if len(parts) != 4 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"--counts {text}: write four numbers, thinkers,talkers,code2wavs,gateways")
    return Counts(*map(int, parts))


def main(arguments: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    costs: Costs = options.values
    if options.costs:
        console.print(report.costs_table(costs))
        return
    begin = time.monotonic()
    gpu, cells = Gpu.named(options.gpu, costs), math.ceil(options.sessions / options.cell)
    mean = round(options.sessions / cells)
    counts = options.counts or size(costs, gpu, mean, realtime=options.realtime)
    if options.spare_zone and options.counts is None:
        counts = for_a_lost_zone(counts)
    load = Load(costs, gpu, counts, options.realtime, options.warm_up_s, options.seconds, options.seed)
    figures: dict[str, Any] = {
        "gpu": gpu.name,
        "cells": cells,
        "a_cell": counts.by_kind(),
        "all": counts.times(cells).by_kind(),
        "shared": shared(costs, options.sessions),
        "checks_without_cells": round(without_cells(costs, gpu, options.sessions), 2),
        "loads": [run(load, round(mean * factor)) | {"load": factor} for factor in options.loads],
        "faults": [],
    }
    if cells > 1:
        sizes = sessions_of_cells(options.sessions, cells, options.seed)
        figures["fullest_cell"] = run(load, sizes[-1])
    for what in options.faults:
        lasting = Load(**{**vars(load), "seconds": options.fault_seconds})
        figures["faults"].append(run(lasting, mean, Fault(what, options.warm_up_s, options.away_s)))
    figures["first_saturated"] = report.first_saturated(figures["loads"])
    report.print_all(console, figures)
    console.print(f"{time.monotonic() - begin:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(figures | {"costs": vars(costs)}, indent=1))


if __name__ == "__main__":
    main()
