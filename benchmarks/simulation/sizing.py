"""How many machines a load needs, by arithmetic; the simulation then shows whether they are enough."""

import itertools
import math

from benchmarks.simulation.cell import Counts
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.decoder import pieces
from benchmarks.simulation.gpus import Gpu, Steps

_MOST_BUSY = 0.7
_THINKER_BATCH, _TALKER_BATCH, _DECODER_BATCH = 64, 32, 2  # of a busy replica's steps
_PREFERRED = 0.85  # of turns that reach the thinker that has their context; the others find it too busy
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
    needed = _thinkers(costs, gpu, steps, sessions), talker, code2wav
    thinkers, talkers, decoders = (max(_LEAST, math.ceil(count)) for count in needed)
    gateways = _gateways(costs, sessions, thinkers + talkers + decoders, realtime=realtime)
    return Counts(thinkers, talkers, decoders, gateways)


def _thinkers(costs: Costs, gpu: Gpu, steps: Steps, sessions: int) -> int:
    """The fewest that have time for the contexts that their caches drop.

    A cache drops what was used longest ago, and a session comes again after a turn. So a context is found if the turn
    is shorter than the time in which as many tokens as the cache holds come in."""
    per_s, context = turns_per_s(costs, sessions), mean_context(costs)
    new = costs.question_s * costs.sound_tokens_per_s + costs.text_tokens
    token_s = steps.thinker(_THINKER_BATCH, _THINKER_BATCH * context) / _THINKER_BATCH
    writing_s = costs.answer_s * costs.tokens_per_s * token_s
    mean_s = costs.question_s + costs.answer_s + costs.silence_s
    deviation_s = math.hypot(math.hypot(costs.question_s, costs.answer_s) * costs.spread, costs.silence_s)
    for count in itertools.count(1):
        holds_s = count * gpu.thinker_tokens / (per_s * context)
        found = _PREFERRED * (1 + math.erf((holds_s - mean_s) / deviation_s / math.sqrt(2))) / 2
        reading_s = (new + (1 - found) * context) * costs.prefill_ms / 1000
        if per_s * (reading_s + writing_s) <= _MOST_BUSY * count:
            return count
    raise AssertionError


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
    return Counts(**{kind: 3 * math.ceil(count / 2) for kind, count in counts.by_kind().items()})
