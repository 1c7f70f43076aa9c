"""When the phases of a request began and ended."""

import time

from quartet.v1 import timings_pb2


class Stopwatch:
    """Marks a request's moments, time.monotonic() seconds, from any thread. A mark keeps its first time, `mark_output`
    also its last."""

    def __init__(self) -> None:
        self.accepted = time.monotonic()
        self.started: float | None = None
        self.prefilled: float | None = None
        self.first_output: float | None = None
        self.last_output: float | None = None

    def mark_started(self) -> None:
        self.started = self.started or time.monotonic()

    def mark_prefilled(self) -> None:
        self.prefilled = self.prefilled or time.monotonic()

    def mark_output(self) -> None:
        """A token, frame or sample leaves the stage."""
        self.last_output = time.monotonic()
        self.first_output = self.first_output or self.last_output

    def elapsed_ms(self) -> float:
        """Since acceptance."""
        return (time.monotonic() - self.accepted) * 1000

    @property
    def first_output_ms(self) -> float | None:
        """From acceptance to the first output; None before it."""
        return (self.first_output - self.accepted) * 1000 if self.first_output else None

    def phases(self) -> list[tuple[str, float, float]]:
        """(name, start, end) of the phases whose marks were set."""
        marks = (self.started, self.prefilled, self.last_output)
        found, before = list[tuple[str, float, float]](), self.accepted
        for name, mark in zip(("queue", "prefill", "decode"), marks, strict=True):
            if mark is not None:
                found.append((name, before, max(before, mark)))
                before = found[-1][2]
        return found

    def to_message(self) -> timings_pb2.Timings:
        """The timings up to now; a phase without its mark has no length."""
        started = self.started or self.accepted
        prefilled = self.prefilled or started
        return timings_pb2.Timings(
            queue_ms=(started - self.accepted) * 1000,
            prefill_ms=(prefilled - started) * 1000,
            decode_ms=max(0.0, (self.last_output or prefilled) - prefilled) * 1000,
            total_ms=self.elapsed_ms(),
            first_output_ms=self.first_output_ms,
        )
