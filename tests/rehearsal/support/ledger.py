"""What a fake GPU saw: waits and faults with their places, kernels and bytes of captures, memory, devices in use."""

import traceback
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

ROOT = Path(__file__).parents[3]
_PACKAGES = ("services", "quartet")


class Kind(StrEnum):
    WAIT = "the host waits for the device"
    COPY_IN_CAPTURE = "a copy between host and device in a capture"
    HOST_WORK_IN_CAPTURE = "work of the host in a capture: replays do not repeat it"
    WAIT_IN_CAPTURE = "a wait in a capture, which CUDA refuses"
    MIXED_DTYPES = "matrices of different dtypes"
    MATH_ATTENTION = "attention by the MATH path: float32, scores written out"
    WRONG_DEVICE = "work on a device that is not current"


@dataclass(frozen=True)
class Event:
    """Something that happened at `place`, "file function"; `line` is for people."""

    kind: Kind
    what: str
    place: str
    line: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}, {self.place}, line {self.line}"


@dataclass
class Work:
    """Kernels of a stretch of work, and the bytes that they read and write."""

    kernels: int = 0
    bytes: int = 0
    operators: Counter[str] = field(default_factory=Counter)

    def add(self, operator: str, kernels: int, bytes_: int) -> None:
        if kernels:
            self.kernels += kernels
            self.bytes += bytes_
            self.operators[operator] += kernels


class Ledger:
    """Everything since the last `clear`.

    Attributes:
        events: with their number.
        work: outside of captures.
        captures: the work of each capture, in order.
        devices: uses of streams, events and graphs, by kind and index of the device.
        attention: paths of attention, with their number.
        convolutions: distinct shapes of inputs and weights: cuDNN makes a plan for each.
        live_bytes, peak_bytes: of device memory, of all devices.
    """

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all but the memory in use."""
        self.events: Counter[Event] = Counter()
        self.work = Work()
        self.captures: list[Work] = []
        self.devices: Counter[tuple[str, int]] = Counter()
        self.attention: Counter[str] = Counter()
        self.convolutions: set[tuple[tuple[int, ...], ...]] = set()
        self.peak_bytes = self.live_bytes

    def note(self, kind: Kind, what: str) -> None:
        self.events[Event(kind, what, *_place())] += 1

    def allocated(self, bytes_: int) -> None:
        self.live_bytes += bytes_
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def of(self, *kinds: Kind) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    def waits(self) -> dict[str, int]:
        """Waits by place."""
        counts: Counter[str] = Counter()
        for event, count in self.events.items():
            if event.kind is Kind.WAIT:
                counts[event.place] += count
        return dict(counts)

    def faults(self) -> list[str]:
        """All but waits outside of captures, for people."""
        return [f"{count} x {event}" for event, count in self.events.items() if event.kind is not Kind.WAIT]


def _place() -> tuple[str, int]:
    """The innermost frame of the product: ("file function", line)."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in _PACKAGES:
            return f"{path.relative_to(ROOT)} {frame.name}", frame.lineno or 0
    return "outside of the product", 0
