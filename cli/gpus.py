"""This machine's CUDA devices, as stages find them.

torch is asked in a process of its own, `python -m cli.gpus`: a CUDA context, once made, stays in a process.
"""

import json
import subprocess
import sys
from collections.abc import Iterator

from cli.budget import GIB, Gpus
from cli.check import has_gpu

TIMEOUT_S = 120.0  # torch's import from a slow disk, and the driver's start
_DRIVER_BYTES = GIB  # less than this is no other program's


def gpus() -> Gpus:
    """In torch's order; none where torch finds none. Raises RuntimeError: it cannot be asked."""
    if not has_gpu():
        return Gpus((), ())
    command = [sys.executable, "-P", "-m", "cli.gpus"]
    try:
        found = subprocess.run(command, capture_output=True, check=True, text=True, timeout=TIMEOUT_S)
        devices: list[tuple[int, int]] = json.loads(found.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no reason"])[-1]
        raise RuntimeError(f"torch cannot say what they are: {last}") from None
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise RuntimeError(f"torch cannot say what they are: {error}") from None
    return of_devices(devices)


def of_devices(devices: list[tuple[int, int]]) -> Gpus:
    """GPUs by (bytes, free bytes) of each."""
    taken = (memory - free if memory - free > _DRIVER_BYTES else 0 for memory, free in devices)
    return Gpus(tuple(memory for memory, _ in devices), tuple(taken))


def _here() -> Iterator[tuple[int, int]]:
    import torch

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        memory_bytes = torch.cuda.get_device_properties(index).total_memory
        try:
            free_bytes, _ = torch.cuda.mem_get_info(index)
        except torch.AcceleratorError:  # no context can be made: it is full, or another program's alone
            free_bytes = 0
        yield memory_bytes, free_bytes


if __name__ == "__main__":
    print(json.dumps(list(_here())))
