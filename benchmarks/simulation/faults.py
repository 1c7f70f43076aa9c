"""What goes wrong, and comes back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from benchmarks.simulation.attempt import Attempt
from benchmarks.simulation.cell import Cell
from benchmarks.simulation.gateway import SimulatedGateway
from benchmarks.simulation.machine import Machine

What = Literal["thinker", "talker", "code2wav", "gateway", "zone"]
WHATS: tuple[What, ...] = get_args(What)
_LOST_ZONE = 1  # not that of the first machines: with one machine of a kind, none of it is there


@dataclass(frozen=True)
class Fault:
    """One process of a kind dies and starts again at once; or a zone, a third of all, disappears.

    Attributes:
        at_s: simulated time.
        away_s: until the zone's machines begin to start again; inf: never.
    """

    what: What
    at_s: float
    away_s: float = 0.0


def plan(cell: Cell, fault: Fault) -> None:
    """Has it happen."""
    cell.clock.after(fault.at_s - cell.clock.now, _happen, cell, fault)


def _happen(cell: Cell, fault: Fault) -> None:
    is_zone = fault.what == "zone"
    machines = [each for each in cell.machines.values() if is_zone or each.kind == fault.what]
    gateways = cell.gateways if is_zone or fault.what == "gateway" else []
    if is_zone:
        machines = [each for each in machines if each.zone == _LOST_ZONE]
        gateways = [each for each in gateways if each.zone == _LOST_ZONE]
    for machine in machines if is_zone else machines[:1]:
        _lose_machine(cell, machine, fault)
    for gateway in gateways if is_zone else gateways[:1]:
        _lose_gateway(cell, gateway, fault.away_s)


def _lose_machine(cell: Cell, machine: Machine, fault: Fault) -> None:
    costs = cell.costs
    is_silent = fault.what == "zone"
    noticed_s = costs.silent_call_s if is_silent else costs.way_ms / 1000
    for attempt in machine.fail("silent" if is_silent else "down"):
        cell.clock.after(noticed_s, Attempt.failed, attempt, machine.kind)
    start_s = {
        "thinker": costs.thinker_start_s,
        "talker": costs.talker_start_s,
        "code2wav": costs.decoder_start_s,
    }[machine.kind]
    _later(cell, fault.away_s + start_s, machine.start)


def _lose_gateway(cell: Cell, gateway: SimulatedGateway, away_s: float) -> None:
    for turn in gateway.fail():
        turn.gateway_lost()
    cell.clock.after(cell.costs.balancer_s, cell.avoid, gateway)

    def start() -> None:
        gateway.start()
        cell.reach(gateway)

    _later(cell, away_s + cell.costs.gateway_start_s, start)


def _later(cell: Cell, delay_s: float, happens: Callable[[], None]) -> None:
    if delay_s != float("inf"):
        cell.clock.after(delay_s, happens)
