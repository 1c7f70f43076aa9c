"""Simulated users who send their next request as soon as the answer to the last one is complete, as those of
`make bench` do."""

import math
import statistics
from collections.abc import Sequence
from random import Random

from benchmarks.simulation.cell import Cell, Counts
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.gpus import Gpu
from benchmarks.simulation.sessions import Sessions
from benchmarks.simulation.shared_cores import APART, Cores, SharedCores
from benchmarks.simulation.turn import Session, Turn

ONE_OF_EACH = Counts(1, 1, 1, 1)
Length = tuple[int, int]
"""Tokens and codec frames of an answer."""


class ClosedLoop(Sessions):
    """`streams` users of a cell, who get answers of these lengths, in this order.

    Attributes:
        total_s: from each request to the end of its answer.
        ended_s: when the last one did.
    """

    def __init__(self, cell: Cell, streams: int, answers: Sequence[Length]) -> None:
        super().__init__(cell, 0, Random(0), realtime=False)
        self.total_s, self.ended_s = list[float](), 0.0
        self._left, self._sent_s = list(reversed(answers)), dict[int, float]()
        for number in range(streams):
            self._send(Session(number, 0.0, 0.0))

    def answered(self, session: Session, plays_s: float) -> None:
        self.ended_s = self._cell.clock.wall_s
        self.total_s.append(self._cell.clock.wall_s - self._sent_s[session.number])
        session.tokens = session.user_tokens = 0.0  # each request is a conversation of its own
        self._send(session)

    def _send(self, session: Session) -> None:
        if self._left:
            self._sent_s[session.number] = self._cell.clock.wall_s
            self._cell.results.started += 1
            turn = Turn(self._cell, session, 0.0, 0.0)
            turn.tokens, turn.frames = self._left.pop()
            turn.start()


def simulate(costs: Costs, gpu: Gpu, streams: int, answers: Sequence[Length], cores: Cores = APART) -> dict[str, float]:
    """TTFA and total (p50, ms), and codec frames a second of all streams, with one replica of each stage.

    Args:
        cores: that all processes share.

    Raises:
        RuntimeError: a request was not answered.
    """
    clock = SharedCores(cores)
    cell = Cell(costs, gpu, ONE_OF_EACH, 0, Random(0), clock=clock)
    for machine in cell.machines.values():
        clock.processes.append((machine.process.engine.works, cores.alone(machine.kind)))
    clock.processes += [(gateway.core.works, cores.alone("gateway")) for gateway in cell.gateways]
    began_s = clock.wall_s
    cell.sessions = loop = ClosedLoop(cell, streams, answers)
    while len(loop.total_s) < len(answers):
        clock.run(clock.now + 0.01)
    found = cell.results.between(0.0, math.inf)
    if found.answered < len(answers):
        raise RuntimeError(f"{len(answers) - found.answered} of {len(answers)} simulated requests were not answered")
    return {
        "TTFA ms": 1000 * statistics.median(found.first_s),
        "total ms": 1000 * statistics.median(loop.total_s),
        "frames/s": sum(frames for _, frames in answers) / (loop.ended_s - began_s),
    }
