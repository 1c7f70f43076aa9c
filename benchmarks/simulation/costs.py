"""What everything costs: each constant with its unit, its source, and its range where it is uncertain."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

GATEWAY = "measured: docs/benchmarks.md, python -m benchmarks.gateway_cost"
COMPUTED = "computed: docs/gpus.md#computed-speed, kernels and bytes of tests/rehearsal, an H100; measured by nobody"
SIZES = "published sizes, as quartet budget counts them"
WORKLOAD = "assumed: docs/scaling.md#to-10-sessions"
DESIGN = "docs/design.md"


def _cost(value: float, unit: str, source: str, low: float | None = None, high: float | None = None) -> Any:
    """`low`, `high`: its range; None: it is certain, as far as its source is."""
    return dataclasses.field(default=value, metadata={"unit": unit, "source": source, "low": low, "high": high})


@dataclass(frozen=True)
class Costs:
    """All constants of a simulation. The units are in the fields' metadata, and in the table of `--costs`."""

    # The user
    question_s: float = _cost(8, "s of speech, mean", WORKLOAD, 4, 12)
    answer_s: float = _cost(8, "s of speech, mean", WORKLOAD, 4, 12)
    silence_s: float = _cost(4, "s between answer heard and next question, mean", WORKLOAD, 2, 10)
    spread: float = _cost(0.6, "of the logarithm of both lengths (log-normal)", "assumed", 0.3, 1.0)
    turns: float = _cost(12, "turns of a session, mean (geometric)", "assumed: contexts of 2,000 tokens", 6, 24)
    sound_tokens_per_s: float = _cost(12.5, "prompt tokens a second of question", SIZES)
    text_tokens: float = _cost(50, "further prompt tokens a turn", WORKLOAD, 0, 200)
    tokens_per_s: float = _cost(3.3, "tokens a second of speech", "docs/scaling.md: 150 words a minute", 2.5, 4.0)
    frames_per_s: float = _cost(12.5, "codec frames a second of speech", SIZES)

    # The gateway, of one core
    question_ms: float = _cost(0.39, "ms a second of question", "measured: json.loads and b64decode of it", 0.2, 0.8)
    request_ms: float = _cost(2.7, "ms a request and its three calls", GATEWAY, 2.2, 3.5)
    piece_ms: float = _cost(3.8 / 17, "ms a piece of sound", GATEWAY, 0.18, 0.3)
    token_ms: float = _cost(1.5 / 40, "ms a token", GATEWAY, 0.03, 0.06)
    microphone_ms: float = _cost(13.4, "ms a second of an open microphone", GATEWAY, 9.5, 13.8)
    check_ms: float = _cost(10 / 12, "ms a health check: all idle work, by its 12 checks a second", GATEWAY, 0.3, 1.0)

    # Edges
    way_ms: float = _cost(1.7, "ms from a stage to the next", COMPUTED, 0.5, 5)
    states_ms: float = _cost(9 / 2500, "ms a prompt position from thinker to talker", COMPUTED, 0.002, 0.01)
    tokenizer_ms: float = _cost(5 / 2500, "ms a prompt position", COMPUTED, 0.001, 0.004)

    # The thinker's step
    thinker_launch_ms: float = _cost(4, "ms a step beside bytes", "assumed: 48 layers of 15 kernels, 5 us each", 3, 8)
    thinker_dense_gb: float = _cost(4.2, "GB a step reads in any case", SIZES)
    thinker_experts_gb: float = _cost(58.0, "GB of all experts, 8 of 128 for each token", SIZES)
    context_gb: float = _cost(96 / 2**20 * 1.073741824, "GB a token of a running context", SIZES)
    prefill_ms: float = _cost(0.02, "ms a prompt token", COMPUTED, 0.016, 0.04)
    prefill_step_tokens: float = _cost(8192, "tokens of a step", "vLLM's default: docs/gpus.md")

    # The talker's step: a frame of every stream
    talker_launch_ms: float = _cost(4.6, "ms a frame beside bytes", COMPUTED, 4.0, 9)
    talker_dense_gb: float = _cost(2.8, "GB a frame reads in any case: layers, 16 passes of the predictor", SIZES)
    talker_experts_gb: float = _cost(6.0, "GB of all experts, 6 of 128 for each stream", SIZES)
    talker_context_gb: float = _cost(20 / 2**20 * 1.073741824, "GB a position of a stream", SIZES)
    talker_prefill_ms: float = _cost(8, "ms a step of prompts", COMPUTED, 6, 16)
    talker_prefill_positions: float = _cost(2048, "positions of such a step", "services/talker/engine.py")

    # code2wav's step
    decoder_launch_ms: float = _cost(1.45, "ms a step beside frames", COMPUTED, 1.2, 3)
    decoder_step_frames: float = _cost(512, "frames of a step", "services/code2wav/engine.py: on a CPU 16")
    decoder_frame_gb: float = _cost((9.1 - 0.5) / 128, "GB a frame", COMPUTED, 0.05, 0.1)

    # GPUs
    bandwidth_share: float = _cost(0.75, "of the published bandwidth that is reached", "assumed", 0.6, 1.0)

    # Faults
    check_interval_s: float = _cost(0.25, "s between two health checks of a replica", DESIGN)
    check_timeout_s: float = _cost(1.0, "s until a check without an answer ends", "gateway/settings.py")
    silent_call_s: float = _cost(5, "s until a call to a host that disappeared ends", DESIGN, 5, 10)
    balancer_s: float = _cost(2, "s until connections avoid a lost gateway", "assumed: one readiness probe", 1, 10)
    thinker_start_s: float = _cost(96, "s", "63 s for weights at 1 GB/s, 33 s of start (small model, 2 cores)", 60, 600)
    talker_start_s: float = _cost(15, "s", "7 s for weights, 8 s of start (small model, 2 cores)", 10, 120)
    decoder_start_s: float = _cost(7, "s", "start of the small model, 2 cores", 5, 60)
    gateway_start_s: float = _cost(6, "s", "start, 2 cores", 3, 20)

    def with_values(self, **values: float) -> Self:
        """Raises ValueError: no constant has such a name, or a value is negative."""
        names = {field.name for field in dataclasses.fields(self)}
        for name, value in values.items():
            if name not in names:
                raise ValueError(f"{name} is no constant; --costs lists them")
            if value < 0:
                raise ValueError(f"{name} is negative")
        return dataclasses.replace(self, **values)

    def at(self, end: str) -> Self:
        """All of its uncertain costs of machines at one end of their range; `end`: "low" or "high".

        The users' own constants stay: they are not a matter of machines. Of what is good if it is large, the other
        end is taken."""
        return dataclasses.replace(self, **dict(self._ends(end)))

    def _ends(self, end: str) -> Iterator[tuple[str, float]]:
        other = {"low": "high", "high": "low"}[end]
        for field in dataclasses.fields(self):
            of_users = field.metadata["source"].startswith("assumed: docs") or field.name in ("spread", "turns")
            chosen = field.metadata[other if field.name == "bandwidth_share" else end]
            if chosen is not None and not of_users and field.name != "tokens_per_s":
                yield field.name, chosen

    def rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Name, value, range, unit and source of each, for people."""
        for field in dataclasses.fields(self):
            low, high = field.metadata["low"], field.metadata["high"]
            range_ = "" if low is None else f"{low:g} to {high:g}"
            value = f"{getattr(self, field.name):.3g}"
            yield field.name, value, range_, field.metadata["unit"], field.metadata["source"]
