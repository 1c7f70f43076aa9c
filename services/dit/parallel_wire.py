"""How a denoiser's arguments get from the first process of a group to the others.

The structure goes through a pipe; tensors follow in the group's own broadcasts, from device to device.
"""

import io
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

Facts = tuple[torch.dtype, torch.Size, str]  # of a tensor: dtype, shape, type of its device


class _Packer(pickle.Pickler):
    """Leaves tensors out and lists them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        # a copy: one element of a stride of 0 counts as contiguous, but cannot be seen as bytes
        self.tensors.append(obj.detach().clone(memory_format=torch.contiguous_format))
        return len(self.tensors) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def pack(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """`value`, which may hold tensors anywhere, for `send`.

    Raises:
        Exception: it holds what no other process can have.
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return file.getvalue(), packer.tensors


def send(packed: tuple[bytes, list[torch.Tensor]], connections: Sequence[Connection]) -> None:
    """To the processes at the other ends. For rank 0.

    Raises:
        OSError, RuntimeError: one of them is gone.
    """
    structure, tensors = packed
    facts: list[Facts] = [(t.dtype, t.shape, t.device.type) for t in tensors]
    for connection in connections:
        connection.send((structure, facts))
    for tensor in tensors:
        _broadcast(tensor)


def receive(message: tuple[bytes, list[Facts]], device: torch.device) -> Any:
    """What rank 0 sent. For the other ranks.

    Args:
        message: from the pipe.
        device: of this rank; tensors that rank 0 has on the CPU come to the CPU.
    """
    structure, facts = message
    tensors = [
        torch.empty(shape, dtype=dtype, device="cpu" if kind == "cpu" else device) for dtype, shape, kind in facts
    ]
    for tensor in tensors:
        _broadcast(tensor)
    return _Unpacker(io.BytesIO(structure), tensors).load()


def _broadcast(tensor: torch.Tensor) -> None:
    """As bytes: not every dtype is known to every backend."""
    if tensor.numel():
        distributed.broadcast(tensor.view(-1).view(torch.uint8), src=0)
