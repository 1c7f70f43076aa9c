"""A cell: gateways, replicas and sessions that know no others."""

import random as global_random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.gateway import SimulatedGateway
from benchmarks.simulation.gpus import Gpu, Steps
from benchmarks.simulation.machine import KINDS, Kind, Machine, maker
from benchmarks.simulation.results import Results
from benchmarks.simulation.sessions import Sessions
from benchmarks.simulation.turn import Session
from gateway.pipeline import balance

ZONES = 3
GATEWAY_REQUESTS = 256  # max_running_requests of a gateway, its default
_FIRST_PORT = 50051


@dataclass(frozen=True)
class Counts:
    """Of machines."""

    thinker: int
    talker: int
    code2wav: int
    gateway: int

    def times(self, factor: int) -> "Counts":
        return Counts(**{kind: factor * count for kind, count in self.by_kind().items()})

    def values(self) -> tuple[int, int, int, int]:
        return self.thinker, self.talker, self.code2wav, self.gateway

    def by_kind(self) -> dict[str, int]:
        return dict(zip(("thinker", "talker", "code2wav", "gateway"), self.values(), strict=True))


@contextmanager
def seeded(seed: int) -> Iterator[Random]:
    """A generator for the simulation; meanwhile the product's own choices, from the global one, are of `seed`, too."""
    state = global_random.getstate()
    global_random.seed(seed)
    try:
        yield Random(seed)
    finally:
        global_random.setstate(state)


class Cell:
    """Args:
        sessions: at a time.
        realtime: see `Sessions`.
        clock: of a machine that its processes share; None: each has one of its own.

    Attributes:
        machines: the stages' replicas, by address.
    """

    def __init__(
        self,
        costs: Costs,
        gpu: Gpu,
        counts: Counts,
        sessions: int,
        random: Random,
        *,
        realtime: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.clock, self.costs, self.counts, self.results = clock or Clock(), costs, counts, Results()
        self._random, steps = random, Steps(costs, gpu)
        self.machines = dict[str, Machine]()
        for network, kind in enumerate(KINDS):
            for number in range(getattr(counts, kind)):
                address = f"10.{network}.{number // 256}.{number % 256}:{_FIRST_PORT}"
                self.machines[address] = Machine(
                    self.clock, kind, address, number % ZONES, maker(self.clock, kind, steps)
                )
        most = 4 * max(sessions, GATEWAY_REQUESTS) if realtime else GATEWAY_REQUESTS
        self.gateways = [
            SimulatedGateway(self.clock, costs, self.machines, number % ZONES, most) for number in range(counts.gateway)
        ]
        self._avoided = set[SimulatedGateway]()
        self.clock.run(0)  # the first checks
        self._thinkers = list(self.gateways[0].stages["thinker"].replicas.values())
        self.sessions = Sessions(self, sessions, random, realtime=realtime)

    def gateway_for_a_connection(self) -> SimulatedGateway | None:
        """A random one of those that the balancer in front takes for alive."""
        alive = [gateway for gateway in self.gateways if gateway not in self._avoided]
        return self._random.choice(alive) if alive else None

    def avoid(self, gateway: SimulatedGateway) -> None:
        if gateway.state != "up":
            self._avoided.add(gateway)

    def reach(self, gateway: SimulatedGateway) -> None:
        self._avoided.discard(gateway)

    def remember(self, session: Session) -> None:
        """The thinker that a session prefers has its context from the turn before, if there is room."""
        preferred = balance.preferred(session.key, self._thinkers)
        contexts = self.machines[preferred.address].process.contexts
        if contexts.start(session.number, session.tokens):
            contexts.end(session.number, session.tokens)

    def of_kind(self, kind: Kind) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.kind == kind]

    def busy_s(self) -> Mapping[str, float]:
        """Time that all machines of a kind have worked, since they started."""
        busy = dict[str, float].fromkeys(self.counts.by_kind(), 0.0)
        for machine in self.machines.values():
            busy[machine.kind] += machine.process.engine.busy_s
        for gateway in self.gateways:
            busy["gateway"] += gateway.core.busy_s + gateway.core.background * self.clock.now
        return busy

    def in_progress(self) -> int:
        """Turns that have begun and not ended."""
        return self.results.started - self.results.finished
