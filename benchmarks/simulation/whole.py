"""Many cells: one is simulated, the fullest one too, and what they share is counted.

Cells know nothing of each other: no call goes from one to another, a gateway checks the replicas of its own cell, and
a session stays in its cell. So what happens in a cell depends on its own sessions alone, and the whole is as many
independent cells, each with the number of sessions that the hash gives it. Shared are the router in front, of which
connections and bytes are counted, and a lost zone, which every cell loses at the same moment."""

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.simulation.cell import Cell, Counts, seeded
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.faults import Fault, plan
from benchmarks.simulation.gpus import Gpu
from benchmarks.simulation.results import figures, quantile
from benchmarks.simulation.sizing import check_share, size, turns_per_s

_BYTES_PER_S = {  # of one stream while it lasts: docs/scaling.md#bytes-on-each-edge
    "question": 32_000,
    "codes": 800,
    "sound": 48_000,
    "sound in base64": 64_000,
}
_STATES_BYTES = 4096  # of a position of sound


@dataclass(frozen=True)
class Load:
    """What is simulated.

    Attributes:
        warm_up_s: before figures are taken.
        seconds: of which they are taken.
    """

    costs: Costs
    gpu: Gpu
    counts: Counts
    realtime: bool
    warm_up_s: float
    seconds: float
    seed: int


def run(load: Load, sessions: int, fault: Fault | None = None) -> dict[str, Any]:
    """Figures of one cell with so many sessions."""
    with seeded(load.seed) as random:
        cell = Cell(load.costs, load.gpu, load.counts, sessions, random, realtime=load.realtime)
        if fault is not None:
            plan(cell, fault)
        cell.clock.run(load.warm_up_s)
        before = cell.busy_s()
        cell.clock.run(load.warm_up_s + load.seconds)
        after = cell.busy_s()
    results = cell.results
    found = {"sessions": sessions} | figures(results.between(load.warm_up_s, cell.clock.now))
    found["computed_share"] = round(results.computed / max(1.0, results.needed), 3)
    found["stages_p95_ms"] = {stage: round(quantile(times, 0.95) * 1000, 1) for stage, times in results.times.items()}
    if fault is None:
        found["busy"] = {
            kind: round((after[kind] - before[kind]) / load.seconds / count, 3)
            for kind, count in load.counts.by_kind().items()
        }
    else:
        found["fault"] = fault.what
        found["where"] = dict(results.where)
        found["retried"] = results.retried
        found["well_again_s"] = results.well_again_s(fault.at_s)
        found["after_fault"] = figures(results.between(fault.at_s, cell.clock.now))
    return found


def sessions_of_cells(sessions: int, cells: int, seed: int) -> list[int]:
    """As many sessions in each as a hash of their ids gives it."""
    random = Random(seed)
    counts = Counter(random.randrange(cells) for _ in range(sessions))
    return sorted(counts[cell] for cell in range(cells))


def shared(costs: Costs, sessions: int) -> dict[str, float]:
    """Of all cells together: requests a second, and gigabits a second on each kind of edge."""
    turns = turns_per_s(costs, sessions)
    question, answer = turns * costs.question_s, turns * costs.answer_s
    states = turns * costs.turns * costs.question_s * costs.sound_tokens_per_s * _STATES_BYTES
    bytes_per_s = {
        "clients to thinkers, questions": question * _BYTES_PER_S["question"],
        "thinkers to talkers, states": states,
        "talkers to code2wavs, codes": answer * _BYTES_PER_S["codes"],
        "code2wavs to gateways, sound": answer * _BYTES_PER_S["sound"],
        "gateways to clients, sound": answer * _BYTES_PER_S["sound in base64"],
    }
    return {"turns/s": round(turns, 1)} | {f"{edge}, Gbit/s": round(b * 8e-9, 2) for edge, b in bytes_per_s.items()}


def without_cells(costs: Costs, gpu: Gpu, sessions: int) -> float:
    """Share of each gateway's core for its checks, if all were one cell."""
    few = costs.with_values(check_ms=0)
    counts = size(few, gpu, sessions, realtime=False)
    return check_share(costs, sum(counts.values()) - counts.gateway)
