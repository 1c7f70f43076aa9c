"""Constants of a machine whose stages share its cores, from loads that were measured on it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulation.closed_loop import Length, simulate
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.decoder import pieces
from benchmarks.simulation.gpus import Gpu
from benchmarks.simulation.shared_cores import Cores

TOKENS, FRAMES = 40, 60  # most of an answer, as of `make bench`
PROMPT_TOKENS = 20.0  # about; they are in the thinker's cache
CPU_STEP_FRAMES = 16  # services/code2wav/engine.py
THIS_MACHINE = Gpu("this machine", 1.0, 10**6, 256)  # a "gigabyte" is a millisecond here
_STAGES = ("thinker", "talker", "code2wav")
_WAYS = 5  # of a first sound: to the thinker, talker, code2wav, gateway and client
_TRIES = 8
_LEAST_OF_A_STEP = 0.1


@dataclass(frozen=True)
class Measured:
    """A load on the real system, of so many `streams` at a time.

    Attributes:
        rounds: the answers of each.
        figures: as `simulate` has them.
        shared_by: by stage, answers that shared a step; of code2wav, codec frames. The means.
        cpu_ms: CPU time of an answer, by stage; "gateway": of the gateway and of the clients.
        talker_prefill_ms: of an answer.
    """

    streams: int
    rounds: Sequence[Sequence[Length]]
    figures: dict[str, float]
    shared_by: dict[str, float]
    cpu_ms: dict[str, float]
    talker_prefill_ms: float

    @property
    def answers(self) -> list[Length]:
        """Of all rounds."""
        return [answer for each in self.rounds for answer in each]

    def step_ms(self, stage: str) -> float:
        """CPU time of a step, all that the stage does beside it included."""
        made = statistics.mean(tokens if stage == "thinker" else frames for tokens, frames in self.answers)
        return self.cpu_ms[stage] * self.shared_by[stage] / made

    def simulated(self, costs: Costs, cores: Cores) -> dict[str, float]:
        """Its figures by `simulate`, of each round alone: each begins and ends with fewer streams."""
        rounds = [simulate(costs, THIS_MACHINE, self.streams, answers, cores) for answers in self.rounds]
        frames = [sum(frames for _, frames in answers) for answers in self.rounds]
        figures = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        return figures | {"frames/s": statistics.harmonic_mean([each["frames/s"] for each in rounds], frames)}


def costs_of(one: Measured, most: Measured, count: int) -> tuple[Costs, Cores]:
    """Of `one`, steps alone, what a request and the way of its first sound cost, and how much of the `count` cores a
    step uses that runs alone; of `most`, what each further answer adds to a step."""
    cores, way_ms = Cores(count), 0.0
    for _ in range(_TRIES):
        simulated = one.simulated(_costs(one, most, cores, way_ms), cores)
        way_ms = max(0.0, way_ms + (one.figures["TTFA ms"] - simulated["TTFA ms"]) / _WAYS)
        slower = simulated["total ms"] / one.figures["total ms"] * one.figures["frames/s"] / simulated["frames/s"]
        cores = Cores(count, min(max(_LEAST_OF_A_STEP, cores.of_a_step * math.sqrt(slower)), count))
    return _costs(one, most, cores, way_ms), cores


def _costs(one: Measured, most: Measured, cores: Cores, way_ms: float) -> Costs:
    launch_ms, more_ms = dict[str, float](), dict[str, float]()
    for stage in _STAGES:
        few, many = (run.step_ms(stage) / cores.alone(stage) for run in (one, most))
        further = most.shared_by[stage] - one.shared_by[stage]
        more = (many - few) / further if further > 0 else 0.0
        more_ms[stage] = min(max(0.0, more), few / one.shared_by[stage])
        launch_ms[stage] = few - more_ms[stage] * one.shared_by[stage]
    base = Costs().with_values(question_s=0, text_tokens=PROMPT_TOKENS)
    sound = statistics.mean(len(pieces(frames)) for _, frames in one.answers) * base.piece_ms + TOKENS * base.token_ms
    times = max(0.0, one.cpu_ms["gateway"] - base.request_ms) / sound  # streamed, token by token
    return base.with_values(
        piece_ms=times * base.piece_ms,
        token_ms=times * base.token_ms,
        way_ms=way_ms,
        states_ms=0,
        tokenizer_ms=0,
        prefill_ms=0,
        thinker_launch_ms=launch_ms["thinker"],
        thinker_dense_gb=0,
        thinker_experts_gb=0,
        context_gb=more_ms["thinker"] / (PROMPT_TOKENS + TOKENS),
        talker_launch_ms=launch_ms["talker"],
        talker_dense_gb=0,
        talker_experts_gb=0,
        talker_context_gb=more_ms["talker"] / (PROMPT_TOKENS + FRAMES / 2),
        talker_prefill_ms=one.talker_prefill_ms,
        decoder_launch_ms=launch_ms["code2wav"],
        decoder_frame_gb=more_ms["code2wav"],
        decoder_step_frames=CPU_STEP_FRAMES,
    )
