"""Where the time of a process's last requests went: a bounded list of spans."""

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from quartet.v1 import profile_pb2

MAX_KEPT = 1_000
MAX_WATCHED = 100_000  # of one profile
_CLOCK_LOOKS = 5


@dataclass(frozen=True, slots=True)
class Span:
    """A request in this process. Times are time.monotonic() seconds; nothing in it is a user's.

    Attributes:
        end: None while it is served.
        outcome: a gRPC status name, or an HTTP status; "" while it is served.
        phases: (name, start, end), one after the other.
        first_output: when the first output left; None if none did.
        owner: name of the request's API key.
    """

    request_id: str
    stage: str
    start: float
    end: float | None = None
    outcome: str = ""
    phases: Sequence[tuple[str, float, float]] = ()
    first_output: float | None = None
    owner: str | None = None

    def to_message(self, to_unix_ns: int) -> profile_pb2.Span:
        """The span on Unix's clock, `to_unix_ns` ahead of the monotonic one."""

        def unix_ns(at: float) -> int:
            return int(at * 1e9) + to_unix_ns

        return profile_pb2.Span(
            request_id=self.request_id,
            stage=self.stage,
            start_unix_ns=unix_ns(self.start),
            end_unix_ns=None if self.end is None else unix_ns(self.end),
            outcome=self.outcome,
            phases=[
                profile_pb2.Phase(name=name, start_unix_ns=unix_ns(start), end_unix_ns=unix_ns(end))
                for name, start, end in self.phases
            ],
            first_output_unix_ns=None if self.first_output is None else unix_ns(self.first_output),
        )


def monotonic_to_unix_ns() -> int:
    """Unix's clock less the monotonic one: the greatest of some, as a pause between both reads makes less."""
    return max(time.time_ns() - time.monotonic_ns() for _ in range(_CLOCK_LOOKS))


@dataclass(eq=False)
class Watch:
    """The first MAX_WATCHED spans that ended since it began; `left_out` counts the others."""

    spans: list[Span] = field(default_factory=list)
    left_out: int = 0

    def add(self, span: Span) -> None:
        if len(self.spans) < MAX_WATCHED:
            self.spans.append(span)
        else:
            self.left_out += 1


class Spans:
    """Spans of the last MAX_KEPT requests that ended in a process, and of those it serves."""

    def __init__(self) -> None:
        self._ended: deque[Span] = deque(maxlen=MAX_KEPT)
        self._served: set[Callable[[], Span]] = set()
        self._watches: set[Watch] = set()

    @contextmanager
    def serving(self, describe: Callable[[], Span]) -> Iterator[None]:
        """The block serves a request, whose span `describe` gives, as it ended after the block."""
        self._served.add(describe)
        try:
            yield
        finally:
            self._served.discard(describe)
            self.add(describe())

    def add(self, span: Span) -> None:
        """Takes an ended request's span."""
        self._ended.append(span)
        for watch in self._watches:
            watch.add(span)

    def ended(self) -> list[Span]:
        """The oldest first."""
        return list(self._ended)

    def served(self) -> list[Span]:
        return [describe() for describe in self._served]

    def find(self, request_id: str) -> list[Span]:
        """Spans of a request and of its parts, "REQUEST_ID-NUMBER"; none for ""."""
        if not request_id:
            return []
        name = re.compile(rf"{re.escape(request_id)}(-\d+)?")
        return [span for span in (*self._ended, *self.served()) if name.fullmatch(span.request_id)]

    def watch(self) -> Watch:
        """Collects from now on, until `unwatch`."""
        self._watches.add(made := Watch())
        return made

    def unwatch(self, watch: Watch) -> None:
        self._watches.discard(watch)
