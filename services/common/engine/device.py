"""The device an engine runs on: choosing it, which paths computations take there, copies to and from it, CUDA graphs.

Each stage has an `execution.py` whose `choices` decides on its paths; its engine does what was decided there, so that
what is told, in its log and by `quartet doctor`, and what runs cannot differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import torch

_WARM_UP_RUNS = 2  # before a capture: libraries allocate and choose kernels on their first calls

log = structlog.get_logger()


def engine_device(asked: str) -> torch.device:
    """The device of this machine that the setting `device` names; see `device_among`."""
    return device_among(torch.cuda.device_count() if torch.cuda.is_available() else 0, asked)


def device_among(cuda_devices: int, asked: str) -> torch.device:
    """The device that `asked` names on a machine with so many, with its index: "auto" is "cuda" where there is one,
    else "cpu".

    Raises:
        ValueError: there is no such device; names the setting and what there is.
    """
    try:
        device = torch.device(("cuda" if cuda_devices else "cpu") if asked == "auto" else asked)
    except RuntimeError:
        raise ValueError(f"--device {asked}: must be auto, cpu, cuda or cuda:N") from None
    if device.type != "cuda":
        return device
    index = device.index or 0
    if index >= cuda_devices:
        there = f"there are {cuda_devices} CUDA devices" if cuda_devices else "torch finds no CUDA device here"
        raise ValueError(f"--device {asked}: {there}; give --device auto or another number")
    return torch.device("cuda", index)


def prepared_device(asked: str) -> torch.device:
    """As `engine_device`: current in the calling thread, and torch's attention kept from cuDNN in this process.

    torch prefers cuDNN on Hopper and Blackwell, where it makes a plan for each new shape and keeps it for that shape
    only: 25 to 440 ms at each new length of a prompt, while everything else in the process waits.
    """
    device = engine_device(asked)
    make_current(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def make_current(device: torch.device) -> None:
    """Makes a CUDA `device` the calling thread's current one: streams, graphs and libraries' handles are made there.

    Every thread of an engine begins with it, as torch's current device is a thread's own.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Staging:
    """Copies through pinned memory, on a stream of its own; where `device` is the CPU there is nothing to copy. For one
    thread only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """A copy of `tensor`, on the device, as it is once what the current stream has been given is done; and the
        event after which it is whole. The current stream goes on meanwhile; it must not write to `tensor` any more."""
        if self._stream is None:
            return tensor, None
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            on_host.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        tensor.record_stream(self._stream)  # its memory is nobody else's until then
        return on_host, copied

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, on the CPU, on the device; the current stream's next work begins when it is there. The calling
        thread waits for a copy within the host at most; then `tensor` is read no more."""
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
    """The least power of two that is at least `n`: few sizes are captured, and a step runs as the next one."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class CapturedRun:
    """What was captured of one function.

    Attributes:
        replay: runs it again on whatever its static tensors hold by then.
        output: the tensor that the function returned; every replay overwrites it.
    """

    replay: Callable[[], object]
    output: torch.Tensor


class Capturer(Protocol):
    """Captures functions that never replay at the same time."""

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        """Captures `run`, which reads and writes static tensors only. It is called some times for that, so whatever it
        changes must not matter now."""
        ...


class CudaGraphs:
    """Captures CUDA graphs on one device; all of them share memory, so capture the largest first: what comes after it
    fits into the blocks that it left.

    One stream serves all captures. For each stream that ever ran a matrix product, cuBLAS keeps a workspace until the
    process ends: 32 MiB on Hopper, 8 MiB before it.

    Args:
        device: a CUDA device with its index. It need not be the thread's current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool: Any = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        """See `Capturer.capture`."""
        # torch captures what goes to the current device; another device's kernels would silently not be in the graph.
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
    """A CUDA device, as far as stages choose their paths by it.

    Attributes:
        name: as the driver calls it, e.g. "NVIDIA H100 80GB HBM3".
        capability: compute capability, e.g. (9, 0) for sm_90.
        memory_bytes: all of its memory.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> "Accelerator | None":
        """The accelerator that `device` is; None for a CPU."""
        if device.type != "cuda":
            return None
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.name, (properties.major, properties.minor), properties.total_memory)

    @property
    def architecture(self) -> str:
        """NVIDIA's name of the compute capability, e.g. "sm_90"."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True)
class Choice:
    """One decision.

    Attributes:
        part: what is computed, one word: "step", "attention", "moe", "sampler", ...
        path: how, in few words: "CUDA graphs", "eager", ...
        reason: what decided it, for a person.
        fatal: whether the stage cannot start like this; `reason` says what to change then.
    """

    part: str
    path: str
    reason: str
    fatal: bool = False


def log_choices(choices: Sequence[Choice]) -> None:
    """One line: every part with its path, and the reasons."""
    log.info(
        "execution paths",
        **{choice.part: choice.path for choice in choices},
        reasons={choice.part: choice.reason for choice in choices},
    )
