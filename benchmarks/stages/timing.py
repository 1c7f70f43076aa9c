"""What a stage of its own does in a step, and what that would take if only memory bandwidth counted."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_COPY_BYTES = 1024**3
_COPIES = 20
_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Stage:
    """A stage at one batch size, ready to step.

    Attributes:
        step: makes `frames` codec frames of every stream, and returns when they are done.
        frames: of a stream, a step.
        step_bytes: weights and state that a step cannot but read, called after some steps.
        note: what else to say of a step, likewise.
    """

    step: Callable[[], object]
    frames: int
    step_bytes: Callable[[], int]
    note: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Timing:
    """Of one batch size. Times in milliseconds."""

    batch: int
    step_ms: float
    frame_ms: float
    frames_per_s: float
    step_bytes: int
    limit_ms: float
    note: str


def measure(stage: Stage, batch: int, steps: int, seconds: float, bytes_per_s: float) -> Timing:
    """Median step time of `steps` steps, or as many as `seconds` allow, but 3.

    Args:
        bytes_per_s: memory bandwidth, for the limit.
    """
    for _ in range(_WARM_UP_STEPS):
        stage.step()
    times_s: list[float] = []
    began_s = time.perf_counter()
    while len(times_s) < 3 or (len(times_s) < steps and time.perf_counter() - began_s < seconds):
        before_s = time.perf_counter()
        stage.step()
        times_s.append(time.perf_counter() - before_s)
    step_s = sorted(times_s)[len(times_s) // 2]
    step_bytes = stage.step_bytes()
    return Timing(
        batch=batch,
        step_ms=step_s * 1000,
        frame_ms=step_s * 1000 / stage.frames,
        frames_per_s=batch * stage.frames / step_s,
        step_bytes=step_bytes,
        limit_ms=step_bytes / bytes_per_s * 1000,
        note=stage.note(),
    )


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy of 1 GiB reads and writes on `device`; the best of some."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / best_s(device, _COPIES, lambda: target.copy_(source))


def best_s(device: torch.device, times: int, work: Callable[[], object]) -> float:
    """The shortest time that `work` took on `device`, of so many, in seconds."""
    times_s: list[float] = []
    for _ in range(times):
        synchronize(device)
        before_s = time.perf_counter()
        work()
        synchronize(device)
        times_s.append(time.perf_counter() - before_s)
    return min(times_s)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parameter_bytes(module: torch.nn.Module) -> int:
    """Memory of a module's parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())
