"""A gateway: the product's stages, replicas, routes and admission; its core, its checks and its calls are simulated."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

import grpc

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.machine import KINDS, Kind, Machine
from gateway.pipeline.config import Code2WavStage, StageConfig, TalkerStage, ThinkerStage
from gateway.pipeline.replica import Replica
from gateway.pipeline.route import Route
from gateway.pipeline.stage import Stage
from services.common.rpc.call import Admission

if TYPE_CHECKING:
    from benchmarks.simulation.turn import Turn

_MOST_BACKGROUND = 0.99
_CHECK_S = 0.002  # of a replica that answers


class Core:
    """One core, which does its work in turn. `background`: the share of it that other work takes."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free_at = clock, 0.0
        self.background, self.busy_s = 0.0, 0.0

    def works(self) -> bool:
        return self._free_at > self._clock.now

    def work(self, ms: float) -> float:
        """Seconds until work that comes now is done."""
        length_s = ms / 1000 / (1 - min(_MOST_BACKGROUND, self.background))
        self.busy_s += ms / 1000
        self._free_at = max(self._clock.now, self._free_at) + length_s
        return self._free_at - self._clock.now


class SimulatedGateway:
    """Attributes:
    stages: the product's, by kind.
    turns: that it serves.
    """

    def __init__(
        self, clock: Clock, costs: Costs, machines: Mapping[str, Machine], zone: int, most_running: int
    ) -> None:
        self._clock, self._costs, self._machines = clock, costs, machines
        self.zone, self.most_running = zone, most_running
        self.state: Literal["up", "down"] = "up"
        self.core, self.turns, self.microphones = Core(clock), dict["Turn", None](), 0
        self.stages, self.admission = self._new()
        clock.after(0, self._watch)

    def _new(self) -> tuple[dict[Kind, Stage], Admission]:
        stages: dict[Kind, Stage] = {kind: Stage(kind, _config(kind, self._machines)) for kind in KINDS}
        admission = Admission(self.most_running, 0, "gateway")
        admission.open()
        self._late = set[Replica]()
        return stages, admission

    @property
    def replicas(self) -> list[Replica]:
        return [replica for stage in self.stages.values() for replica in stage.replicas.values()]

    def route(self, request_id: str, key: bytes) -> Route:
        return Route(list(self.stages.values()), request_id, key)

    def admit(self, turn: "Turn") -> ExitStack:
        """A place; closing it gives it back. Raises QueueFull."""
        with ExitStack() as place:
            place.enter_context(self.admission.admit())
            self.turns[turn] = None
            place.callback(self.turns.pop, turn, None)
            return place.pop_all()

    def fail(self) -> list["Turn"]:
        """It dies. Returns the turns that end with it."""
        self.state = "down"
        return list(self.turns)

    def start(self) -> None:
        """A new process knows nothing of its replicas' load, and checks them."""
        self.stages, self.admission = self._new()
        self.state = "up"
        self.check_all()

    def check_all(self) -> float:
        """Checks all replicas at once. Returns the seconds until all that answer at all have answered."""
        for replica in self.replicas:
            self.check(replica)
        return self._costs.check_timeout_s if self._late else _CHECK_S

    def check(self, replica: Replica) -> None:
        machine = self._machines[replica.address]
        if machine.state == "up":
            losses = replica.losses
            replica.take_load(machine.load(), replica.in_flight)
            replica.check_answered(True, None, losses)
        elif machine.state == "down":
            replica.check_failed(grpc.StatusCode.UNAVAILABLE, "connection refused", replica.healthy)
        elif replica not in self._late:
            self._late.add(replica)
            self._clock.after(self._costs.check_timeout_s, self._is_late, replica, replica.healthy)

    def _is_late(self, replica: Replica, was_healthy: bool) -> None:
        self._late.discard(replica)
        replica.check_failed(grpc.StatusCode.DEADLINE_EXCEEDED, "", was_healthy)

    def _watch(self) -> None:
        costs, per_s = self._costs, 1 / self._costs.check_interval_s
        checks = len(self._machines) * per_s * costs.check_ms / 1000
        self.core.background = checks + self.microphones * costs.microphone_ms / 1000
        if self.state == "up":
            self.check_all()
        self._clock.after(costs.check_interval_s, self._watch)


def _config(kind: Kind, machines: Mapping[str, Machine]) -> StageConfig:
    addresses: Sequence[str] = [machine.address for machine in machines.values() if machine.kind == kind]
    if kind == "thinker":
        return ThinkerStage(kind=kind, address=list(addresses))
    if kind == "talker":
        return TalkerStage(kind=kind, address=list(addresses), source="thinker")
    return Code2WavStage(kind=kind, address=list(addresses), source="talker")
