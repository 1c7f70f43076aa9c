"""This machine's CUDA devices, as stages find them.

torch is asked in a process of its own, `python -m cli.gpus`: a CUDA context, once made, stays in a process.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from cli.check import has_gpu

TIMEOUT_S = 120.0  # torch's import from a slow disk, and the driver's start


@dataclass(frozen=True)
class Gpu:
    """One of them; `free_bytes`: no program has taken them."""

    name: str
    memory_bytes: int
    free_bytes: int


def gpus() -> tuple[Gpu, ...]:
    """In torch's order; none where torch finds none, or is not there: the stages' own starts say why."""
    if not has_gpu():
        return ()
    try:
        found = subprocess.run(
            [sys.executable, "-P", "-m", "cli.gpus"], capture_output=True, check=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(Gpu(**each) for each in json.loads(found.stdout))


def _here() -> Iterator[Gpu]:
    import torch

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free_bytes, memory_bytes = torch.cuda.mem_get_info(index)
        yield Gpu(torch.cuda.get_device_name(index), memory_bytes, free_bytes)


if __name__ == "__main__":
    print(json.dumps([asdict(each) for each in _here()]))
