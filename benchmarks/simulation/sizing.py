"""How many machines a load needs, by arithmetic; the simulation then shows whether they are enough."""

import math

from benchmarks.simulation.cell import Counts
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.decoder import pieces
from benchmarks.simulation.gpus import Gpu, Steps

_MOST_BUSY = 0.7
_THINKER_BATCH, _TALKER_BATCH, _DECODER_BATCH = 64, 32, 2  # of a busy replica's steps
_LEAST = 2  # of each: one may die


def turns_per_s(costs: Costs, sessions: int) -> float:
    """Of so many sessions, whose answers begin at once."""
    return sessions / (costs.question_s + costs.answer_s + costs.silence_s)


def mean_context(costs: Costs) -> float:
    """Tokens of a session in the middle of its conversation."""
    a_turn = costs.question_s * costs.sound_tokens_per_s + costs.text_tokens + costs.answer_s * costs.tokens_per_s
    return costs.turns * a_turn


def size(costs: Costs, gpu: Gpu, sessions: int, *, realtime: bool) -> Counts:
    """Machines of a cell, each busy for 70 % of its time at most."""
    steps, per_s = Steps(costs, gpu), turns_per_s(costs, sessions) / _MOST_BUSY
    context, frames = mean_context(costs), costs.answer_s * costs.frames_per_s
    frame_s = steps.talker(_TALKER_BATCH, _TALKER_BATCH * context) / _TALKER_BATCH
    talker = per_s * (frames * frame_s + costs.talker_prefill_ms / 1000)
    launches = len(pieces(round(frames))) / _DECODER_BATCH
    one_frame_s = steps.decoder(1) - steps.decoder(0)
    code2wav = per_s * (launches * steps.decoder(0) + frames * one_frame_s)
    stages = [max(_LEAST, math.ceil(count)) for count in (_thinkers(costs, gpu, steps, sessions), talker, code2wav)]
    return Counts(*stages, _gateways(costs, sessions, sum(stages), realtime=realtime))


def _thinkers(costs: Costs, gpu: Gpu, steps: Steps, sessions: int) -> float:
    """The fewest that have room for a share of all contexts, and time to compute the others."""
    per_s, context = turns_per_s(costs, sessions) / _MOST_BUSY, mean_context(costs)
    new = costs.question_s * costs.sound_tokens_per_s + costs.text_tokens
    token_s = steps.thinker(_THINKER_BATCH, _THINKER_BATCH * context) / _THINKER_BATCH
    writing_s = costs.answer_s * costs.tokens_per_s * token_s

    def by(cached: float) -> float:
        reading_s = (new + (1 - cached) * context) * costs.prefill_ms / 1000
        return max(per_s * (reading_s + writing_s), cached * sessions * context / gpu.thinker_tokens)

    return min(by(percent / 100) for percent in range(101))


def _gateways(costs: Costs, sessions: int, replicas: int, *, realtime: bool) -> int:
    checks = check_share(costs, replicas)
    if checks >= _MOST_BUSY:
        raise ValueError(f"{replicas} replicas are more than one gateway can check; take smaller cells")
    if realtime:
        work = sessions * costs.microphone_ms / 1000
    else:
        work = turns_per_s(costs, sessions) * costs.question_ms * costs.question_s / 1000
    parts = len(pieces(round(costs.answer_s * costs.frames_per_s)))
    turn_ms = costs.request_ms + costs.piece_ms * parts + costs.token_ms * costs.answer_s * costs.tokens_per_s
    work += turns_per_s(costs, sessions) * turn_ms / 1000
    return max(_LEAST, math.ceil(work / (_MOST_BUSY - checks)))


def check_share(costs: Costs, replicas: int) -> float:
    """Of a gateway's core, for the checks of so many replicas."""
    return replicas * costs.check_ms / 1000 / costs.check_interval_s


def for_a_lost_zone(counts: Counts) -> Counts:
    """So many that two thirds of them are enough."""
    return Counts(*(3 * math.ceil(count / 2) for count in counts.values()))
