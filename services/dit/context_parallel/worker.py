"""The processes of the other ranks. Rank 0's calls come through a pipe, their tensors by broadcast between devices."""

import io
import pickle
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import distributed

from services.common.engine.device import engine_device, make_current
from services.common.engine.process import end_with_parent
from services.common.telemetry import logs
from services.dit.config import DitSettings
from services.dit.context_parallel.ranks import join
from services.dit.models import Models

TensorHeader = tuple[torch.dtype, torch.Size, str]
"""Dtype, shape, type of device."""

log = structlog.get_logger()


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


def pack_call(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """(pickle, tensors) of `value`, which may hold tensors anywhere. Raises what pickle raises."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return file.getvalue(), packer.tensors


def send_call(packed: tuple[bytes, list[torch.Tensor]], connections: Sequence[Connection]) -> None:
    """Sends a call of rank 0. Raises OSError or RuntimeError if a rank is gone."""
    structure, tensors = packed
    headers: list[TensorHeader] = [(t.dtype, t.shape, t.device.type) for t in tensors]
    for connection in connections:
        connection.send((structure, headers))
    for tensor in tensors:
        _broadcast(tensor)


def receive_call(message: tuple[bytes, list[TensorHeader]], device: torch.device) -> Any:
    """What rank 0 packed. Tensors that rank 0 has on the CPU come to the CPU, others to `device`."""
    structure, headers = message
    tensors = [
        torch.empty(shape, dtype=dtype, device="cpu" if kind == "cpu" else device) for dtype, shape, kind in headers
    ]
    for tensor in tensors:
        _broadcast(tensor)
    return _Unpacker(io.BytesIO(structure), tensors).load()


def _broadcast(tensor: torch.Tensor) -> None:
    """As bytes: not every dtype is known to every backend."""
    if tensor.numel():
        distributed.broadcast(tensor.view(-1).view(torch.uint8), src=0)


def work(rank: int, values: dict[str, Any], store: Path, connection: Connection) -> None:
    """Holds the denoisers and repeats each call of rank 0.

    Args:
        rank: from 1.
        values: of the settings.
        store: see `ranks.join`.
        connection: this end of the pipe; see `Group`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 gets them too, drains, and then ends this process
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(store.parent)
    settings = DitSettings(**values)
    logs.configure(settings.log_level, f"dit-{rank}")
    device = engine_device(settings.device)
    try:
        make_current(device)
        models = Models(settings, only_denoisers=True)
        connection.send(None)
        join(settings, rank, store, models.denoisers)
    except Exception as error:
        log.exception("a worker could not start", rank=rank)
        connection.send(repr(error))
        return
    connection.send(None)
    with torch.no_grad():
        while (message := connection.recv()) is not None:
            connection.send(_repeat(models, message, device))
    distributed.destroy_process_group()


def _repeat(models: Models, message: Any, device: torch.device) -> str | None:
    """Makes a call of rank 0; returns what went wrong."""
    try:
        name, arguments, loras = receive_call(message, device)
        with models.set_up(loras):
            getattr(models.pipeline, name).forward(**arguments)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        return repr(error)
    return None
