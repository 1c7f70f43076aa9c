"""An engine's device: which it is, the paths of computations there, copies to and from it, CUDA graphs.

Each stage's `execution.py` chooses its paths, which the engine takes, and which log and `quartet doctor` report.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import torch

_WARM_UP_RUNS = 2  # before a capture: first calls of libraries allocate, and choose kernels

log = structlog.get_logger()


def engine_device(requested: str) -> torch.device:
    """As `device_among` this machine's."""
    return device_among(torch.cuda.device_count() if torch.cuda.is_available() else 0, requested)


def device_among(cuda_devices: int, requested: str) -> torch.device:
    """The device, with its index, that the setting `device` names: "auto" is "cuda" if there is one, else "cpu".

    Raises:
        ValueError: there is no such device; names the setting and what there is.
    """
    try:
        device = torch.device(("cuda" if cuda_devices else "cpu") if requested == "auto" else requested)
    except RuntimeError:
        raise ValueError(f"--device {requested}: must be auto, cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"--device {requested}: no stage has run there; give auto, cpu, cuda or cuda:N")
    index = device.index or 0
    if index >= cuda_devices:
        there = f"there are {cuda_devices} CUDA devices" if cuda_devices else "torch finds no CUDA device here"
        raise ValueError(f"--device {requested}: {there}; give --device auto or another number")
    return torch.device("cuda", index)


def prepared_device(requested: str) -> torch.device:
    """As `engine_device`, made current in the calling thread, without cuDNN's attention in this process.

    torch prefers cuDNN on Hopper and Blackwell, where each new length of a prompt costs a plan: 25 to 440 ms, while
    everything else in the process waits.
    """
    device = engine_device(requested)
    make_current(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def make_current(device: torch.device) -> None:
    """Makes a CUDA `device` current in the calling thread: each thread of an engine begins with it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def use_own_stream(device: torch.device) -> None:
    """As `make_current`, with a new stream for all that the calling thread computes."""
    make_current(device)
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))


class Staging:
    """Copies through pinned memory, on a stream of its own; none for a CPU. For one thread only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """A copy of `tensor`, on the device, after the current stream's work so far; and the event after which it is
        whole. The current stream goes on meanwhile, and must not write to `tensor` any more."""
        if self._stream is None:
            return tensor, None
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            on_host.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        tensor.record_stream(self._stream)  # keeps its memory until then
        return on_host, copied

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, on the CPU, on the device, before the current stream's next work. The calling thread waits at most
        for a copy within the host; then `tensor` is read no more."""
        if self._stream is None:
            return tensor
        pinned = tensor.pin_memory()
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = pinned.to(self._device, non_blocking=True)
        current.wait_stream(self._stream)
        moved.record_stream(current)
        return moved


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class CapturedRun:
    """A captured function.

    Attributes:
        replay: runs it on what its static tensors then hold.
        output: the tensor that it returned; every replay overwrites it.
    """

    replay: Callable[[], object]
    output: torch.Tensor


class Capturer(Protocol):
    """Captures functions that never replay at the same time."""

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        """Captures `run`, which reads and writes static tensors only. It is called several times: what it changes must
        not matter yet."""
        ...


class CudaGraphs:
    """Captures CUDA graphs on one device. They share memory: capture the largest first, and the others fit into it.

    One stream serves all captures: for each stream with a matrix product, cuBLAS keeps a workspace until the process
    ends, 32 MiB on Hopper, 8 MiB before it.

    Args:
        device: a CUDA device with its index; it need not be current.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool: Any = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        # torch captures the current device's kernels only, silently.
        with torch.cuda.device(self._device):
            caller = torch.cuda.current_stream()
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UP_RUNS):
                    run()
            caller.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                output = run()
        return CapturedRun(graph.replay, output)


@dataclass(frozen=True)
class Accelerator:
    """The facts of a GPU that stages choose their paths by.

    Attributes:
        name: the driver's, e.g. "NVIDIA H100 80GB HBM3".
        capability: compute capability, e.g. (9, 0) for sm_90. AMD's numbers mean something else.
        memory_bytes: all of its memory.
        gfx: AMD's name of the architecture, e.g. "gfx942"; "": it is NVIDIA's. torch's CUDA is then ROCm's HIP.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    gfx: str = ""

    @classmethod
    def of(cls, device: torch.device) -> "Accelerator | None":
        """None for a CPU."""
        if device.type != "cuda":
            return None
        properties = torch.cuda.get_device_properties(device)
        gfx = properties.gcnArchName.partition(":")[0] if torch.version.hip else ""
        return cls(properties.name, (properties.major, properties.minor), properties.total_memory, gfx)

    @property
    def architecture(self) -> str:
        """The vendor's name: "sm_90", or "gfx942"."""
        return self.gfx or f"sm_{self.capability[0]}{self.capability[1]}"

    def has_major(self, *majors: int) -> bool:
        """Whether it is NVIDIA's, of one of these compute capabilities."""
        return not self.gfx and self.capability[0] in majors


def captures(compile: str, accelerator: Accelerator | None) -> bool:
    """Whether steps are CUDA graphs on `accelerator`; None is a CPU. `compile` is the setting."""
    return accelerator is not None and compile != "off"


@dataclass(frozen=True)
class Choice:
    """One decision.

    Attributes:
        part: what is computed, one word: "step", "attention", "moe", "sampler", ...
        path: how: "CUDA graphs", "eager", ...
        reason: what decided it, for people.
        fatal: the stage cannot start like this; `reason` says what to change.
    """

    part: str
    path: str
    reason: str
    fatal: bool = False


def log_choices(choices: Sequence[Choice]) -> None:
    log.info(
        "execution paths",
        **{choice.part: choice.path for choice in choices},
        reasons={choice.part: choice.reason for choice in choices},
    )
