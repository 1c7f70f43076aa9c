"""Captures a function of static tensors as a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch

_WARM_UP_RUNS = 2  # before a capture: libraries allocate and choose kernels on their first calls


def capture(
    run: Callable[[], torch.Tensor], pool: Any, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The graph of what `run` launches, and the tensor that every replay overwrites with its result.

    `run` is called some times for that, so whatever it changes must not matter now.

    Args:
        pool: the handle of `torch.cuda.graph_pool_handle`; graphs that never replay at the same time can share one.
        device: on which `run` works.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP_RUNS):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()
    return graph, result
