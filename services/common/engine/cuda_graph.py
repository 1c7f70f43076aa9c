"""Captures functions of static tensors as CUDA graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_WARM_UP_RUNS = 2  # before a capture: libraries allocate and choose kernels on their first calls


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
