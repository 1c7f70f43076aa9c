"""Figures of one load from its answers. docs/benchmarks.md defines each of them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.traffic.answer import Answer
from benchmarks.traffic.player import AUDIBLE_GAP_MS, longest_gap_ms

PERCENTILES = (50, 95, 99)
PHASES = ("queue_ms", "prefill_ms", "first_output_ms", "decode_ms", "total_ms")
WAITS = {"talker": "waited_for_text_ms", "code2wav": "waited_for_frames_ms"}

# 50, 95, 99 as text: the percentile, and its value.
Spread = dict[str, float]


@dataclass
class Figures:
    """What one load came to, on one side.

    Attributes:
        requests: that were answered; the figures are of these.
        failed: requests that were not, and `errors` says why.
        silent: answered without any audio; left out of the figures about audio.
        wall_s: from the first request sent to the last answer complete.
        spreads: percentiles by figure.
        audio_s_per_s, frames_per_s, requests_per_s: of all streams together, over the wall time.
        gap_free_share: of streams whose player had no gap above 100 ms.
        stage_frames_per_s: by stage, p50 of the frames a second of one stream while the stage was not waiting for
            the one before it.
        stages: by stage and phase, p50 in milliseconds of the server's own account.
        cpu_s_per_request: by process, seconds of CPU time; empty where the processes cannot be seen.
        memory_mib: likewise, after the load.
        client_cpu_s_per_request: of the load generator, which takes it from the same machine; 0 where it is not told.
    """

    requests: int
    failed: int
    silent: int
    wall_s: float
    spreads: dict[str, Spread]
    audio_s_per_s: float
    frames_per_s: float
    requests_per_s: float
    gap_free_share: float
    stage_frames_per_s: dict[str, float] = field(default_factory=dict)
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    cpu_s_per_request: dict[str, float] = field(default_factory=dict)
    memory_mib: dict[str, float] = field(default_factory=dict)
    client_cpu_s_per_request: float = 0.0

    @property
    def cpu_s(self) -> float | None:
        """CPU seconds a request, of all processes; None if unknown."""
        return sum(self.cpu_s_per_request.values()) or None

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


def figures(answers: Sequence[Answer], sample_rate_hz: int) -> Figures:
    """Figures of one load.

    Raises:
        ValueError: no answer has audio.
    """
    answered = [answer for answer in answers if answer.error is None]
    spoken = [answer for answer in answered if answer.samples]
    if not spoken:
        reasons = {answer.error or "no audio" for answer in answers}
        raise ValueError(f"none of {len(answers)} requests was answered with audio: {'; '.join(sorted(reasons))}")
    written = [answer for answer in answered if answer.text_s]
    gaps_ms = longest_gaps_ms(spoken, sample_rate_hz)
    wall_s = max(answer.done_s for answer in answered) - min(answer.sent_s for answer in answered)
    audio_s = sum(answer.samples for answer in spoken) / sample_rate_hz
    spreads = {
        "ttft_ms": _spread((answer.text_s[0] - answer.sent_s) * 1000 for answer in written),
        "ttfa_ms": _spread(first_audio_ms(spoken)),
        "itl_ms": _spread(float(gap) * 1000 for answer in written for gap in np.diff(answer.text_s)),
        "tpot_ms": _spread(
            (answer.text_s[-1] - answer.text_s[0]) * 1000 / (answer.tokens - 1)
            for answer in written
            if answer.tokens > 1
        ),
        "total_ms": _spread((answer.done_s - answer.sent_s) * 1000 for answer in answered),
        "rtf": _spread(_rtf(answer, sample_rate_hz) for answer in spoken),
        "longest_gap_ms": _spread(gaps_ms),
    }
    return Figures(
        requests=len(answered),
        failed=len(answers) - len(answered),
        silent=len(answered) - len(spoken),
        wall_s=wall_s,
        spreads=spreads,
        audio_s_per_s=audio_s / wall_s,
        frames_per_s=sum(answer.frames for answer in spoken) / wall_s,
        requests_per_s=len(answered) / wall_s,
        gap_free_share=sum(gap_ms <= AUDIBLE_GAP_MS for gap_ms in gaps_ms) / len(spoken),
        stage_frames_per_s=_stage_speeds(spoken),
        stages=_stages(spoken),
        errors=sorted({answer.error for answer in answers if answer.error}),
    )


def first_audio_ms(answers: Sequence[Answer]) -> list[float]:
    """TTFA of every answer with audio."""
    return [(answer.audio[0][0] - answer.sent_s) * 1000 for answer in answers if answer.audio]


def longest_gaps_ms(answers: Sequence[Answer], sample_rate_hz: int) -> list[float]:
    """Longest gap of every answer with audio."""
    return [
        longest_gap_ms((came_s * 1000, samples * 1000 / sample_rate_hz) for came_s, samples in answer.audio)
        for answer in answers
        if answer.audio
    ]


def _spread(values: Iterable[float]) -> Spread:
    values = list(values)
    return {f"p{p}": float(np.percentile(values, p)) if values else 0.0 for p in PERCENTILES}


def _rtf(answer: Answer, sample_rate_hz: int) -> float:
    return (answer.audio[-1][0] - answer.sent_s) * sample_rate_hz / answer.samples


def _stages(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """p50 of each phase of each stage, and of its waiting for the stage before."""
    stages: dict[str, dict[str, float]] = {}
    for name in answers[0].timings:
        keys = [*PHASES, *([WAITS[name]] if name in WAITS else [])]
        own = [answer.timings[name] for answer in answers]
        stages[name] = {key: _median(timings.get(key) for timings in own) for key in keys}
    return stages


def _stage_speeds(answers: Sequence[Answer]) -> dict[str, float]:
    """p50 of frames over the time a stage had the request and did not wait for the stage before it."""

    def speed(answer: Answer, stage: str) -> float | None:
        timings = answer.timings[stage]
        own_ms = (timings["total_ms"] or 0.0) - (timings[WAITS[stage]] or 0.0)
        return answer.frames * 1000 / own_ms if own_ms > 0 else None

    stages = [stage for stage in WAITS if stage in answers[0].timings]
    return {stage: _median(speed(answer, stage) for answer in answers) for stage in stages}


def _median(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else 0.0
