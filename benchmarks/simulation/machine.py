"""Processes of stages: the product's admission before an engine that is simulated."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.contexts import Contexts
from benchmarks.simulation.decoder import Decoder
from benchmarks.simulation.engine import Engine
from benchmarks.simulation.gpus import Steps
from quartet.v1 import server_info_pb2
from services.common.rpc.call import Admission

if TYPE_CHECKING:
    from benchmarks.simulation.attempt import Attempt

Kind = Literal["thinker", "talker", "code2wav"]
KINDS: tuple[Kind, ...] = ("thinker", "talker", "code2wav")
_DECODER_STREAMS = 512
_MOST_RUNNING = 256


@dataclass(frozen=True)
class Process:
    """What a process has from its start to its end."""

    admission: Admission
    engine: Engine | Decoder
    contexts: Contexts


class Machine:
    """One replica.

    Args:
        make: its process.

    Attributes:
        state: "down" refuses connections; "silent" answers nothing.
        calls: that it serves, or is thought to.
    """

    def __init__(self, clock: Clock, kind: Kind, address: str, zone: int, make: Callable[[], Process]) -> None:
        self._clock, self._make = clock, make
        self.kind: Kind = kind
        self.address, self.zone = address, zone
        self.state: Literal["up", "down", "silent"] = "up"
        self.calls = dict["Attempt", None]()
        self.process = make()

    def admit(self, attempt: "Attempt") -> ExitStack:
        """A place; closing it gives it back. Raises QueueFull."""
        with ExitStack() as place:
            place.enter_context(self.process.admission.admit())
            self.calls[attempt] = None
            place.callback(self.calls.pop, attempt, None)
            return place.pop_all()

    def load(self) -> server_info_pb2.GetLoadResponse:
        """What it answers a health check."""
        admission = self.process.admission
        return server_info_pb2.GetLoadResponse(serving=True, running=admission.running, queued=admission.queued)

    def fail(self, state: Literal["down", "silent"]) -> list["Attempt"]:
        """It dies, or its host disappears. Returns the calls that end with it, which make nothing more from now on."""
        self.state = state
        calls = list(self.calls)
        for attempt in calls:
            attempt.lost(self.kind)
        return calls

    def start(self) -> None:
        """A new process serves, with nothing in its cache."""
        self.process, self.state = self._make(), "up"
        self.calls.clear()


def maker(clock: Clock, kind: Kind, steps: Steps) -> Callable[[], Process]:
    """Makes processes of a kind, with the limits that its GPU's memory gives them."""
    costs, gpu = steps.costs, steps.gpu
    most_running = {"thinker": _MOST_RUNNING, "talker": gpu.talker_streams, "code2wav": _DECODER_STREAMS}[kind]

    def make() -> Process:
        admission, contexts = Admission(most_running, most_running, kind), Contexts(gpu.thinker_tokens)
        admission.open()
        if kind == "code2wav":
            return Process(admission, Decoder(clock, steps.decoder, costs.decoder_step_frames), contexts)
        if kind == "talker":
            most = costs.talker_prefill_positions
            engine = Engine(clock, steps.talker, steps.talker_prefill, most, most_running, steps_on=False)
            return Process(admission, engine, contexts)

        engine = Engine(
            clock,
            steps.thinker,
            steps.thinker_prefill,
            costs.prefill_step_tokens,
            most_running,
            steps_on=True,
        )
        return Process(admission, engine, contexts)

    return make
