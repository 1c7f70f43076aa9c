"""Context parallelism: several devices share the sequence of each denoising call, by diffusers' own implementation.

diffusers wants a process per device, all of which make the same calls. The pipeline runs in the first process (rank 0)
only; the others (`parallel_group.work`) hold the denoisers, and repeat each call of rank 0's engine. The structure of a
call's arguments gets to them through a pipe; its tensors follow in the group's broadcasts, from device to device.
"""

import io
import json
import os
import pickle
import sys
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from services.common.engine.device import Accelerator, engine_device
from services.diffusion.families import DENOISERS
from services.dit.config import DitSettings
from services.dit.execution import devices

TensorHeader = tuple[torch.dtype, torch.Size, str]
"""Of a tensor: dtype, shape, type of its device."""

NO_LSE = frozenset({"native", "_native_npu"})  # they do not return what a ring's parts are put together by
GROUP_TIMEOUT_S = 60.0  # for what ranks do at about the same time, so only an error takes so long


def check(settings: DitSettings, folder: Path) -> None:
    """Whether the checkpoint and this machine can do what `settings` ask for.

    Args:
        folder: of the checkpoint.

    Raises:
        ValueError: they cannot; says why.
    """
    size, ulysses, ring = settings.parallel_devices, settings.context_parallel_ulysses, settings.context_parallel_ring
    asked = f"context_parallel_ulysses={ulysses}, context_parallel_ring={ring}"
    index = json.loads((folder / "model_index.json").read_text())
    for name in DENOISERS:
        if not (folder / name).is_dir():
            continue
        cls = getattr(diffusers, index[name][1], None)
        if getattr(cls, "_cp_plan", None) is None:
            raise ValueError(f"{asked}: diffusers has no context-parallel plan for {index[name][1]}; leave it out")
        heads = json.loads((folder / name / "config.json").read_text())["num_attention_heads"]
        if heads % ulysses:
            raise ValueError(
                f"context_parallel_ulysses={ulysses} does not divide the {heads} attention heads of {name}"
            )
    backend = (settings.attention_backend or "native").lower()
    supported = _AttentionBackendRegistry._supports_context_parallel - (NO_LSE if ring > 1 else set())
    if backend not in supported:
        raise ValueError(f"{asked}: attention_backend={backend} cannot do that; one of {sorted(supported)} can")
    on_cpu = settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available())
    if not on_cpu and settings.device not in ("auto", "cuda"):
        raise ValueError(f"{asked}: device={settings.device} is one device; say cuda, and pick by CUDA_VISIBLE_DEVICES")
    if not on_cpu and torch.cuda.device_count() < size:
        raise ValueError(f"{asked}: {size} CUDA devices are needed, and there are {torch.cuda.device_count()}")
    choice = devices(settings, Accelerator.of(resolve_device(settings, 0)))
    if choice.fatal:
        raise ValueError(choice.reason)


def resolve_device(settings: DitSettings, rank: int) -> torch.device:
    """The device of this process: where several share each call, that of the group's `rank`."""
    device = engine_device(settings.device)
    return device if settings.parallel_devices == 1 or device.type == "cpu" else torch.device("cuda", rank)


def join(settings: DitSettings, rank: int, store: Path, denoisers: list[Any]) -> None:
    """Makes this process `rank` of the group, and `denoisers` parts of those of all ranks. Blocks until all have come.

    Args:
        store: a file that does not exist; the same for all ranks, which are on one machine.

    Raises:
        ValueError: diffusers refuses.
        RuntimeError: a rank did not come.
    """
    device = resolve_device(settings, rank)
    if sys.platform == "linux":  # else they may listen on, and look for each other at, an address of the network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=settings.parallel_devices,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    context = ContextParallelConfig(
        ulysses_degree=settings.context_parallel_ulysses,
        ring_degree=settings.context_parallel_ring,
        # any lengths of prompts and (not with gloo) of pictures; diffusers has that for either kind, not for both
        ulysses_anything=settings.context_parallel_ring == 1,
        ring_anything=settings.context_parallel_ulysses == 1,
    )
    config = ParallelConfig(context_parallel_config=context)
    mesh = init_device_mesh(device.type, context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config.setup(rank, settings.parallel_devices, device, mesh=mesh)
    for denoiser in denoisers:
        # diffusers' own would make a mesh for each model, and divides by the number of accelerators
        denoiser._resolve_parallel_config = lambda asked, denoiser=denoiser: _use(denoiser, asked)
        denoiser.enable_parallelism(config=config)


def _use(denoiser: Any, config: ParallelConfig) -> ParallelConfig:
    denoiser._parallel_config = config
    return config


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
    """`value`, which may hold tensors anywhere, for `send_call`.

    Raises:
        Exception: it holds what no other process can have.
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return file.getvalue(), packer.tensors


def send_call(packed: tuple[bytes, list[torch.Tensor]], connections: Sequence[Connection]) -> None:
    """To the processes at the other ends. For rank 0.

    Raises:
        OSError, RuntimeError: one of them is gone.
    """
    structure, tensors = packed
    headers: list[TensorHeader] = [(t.dtype, t.shape, t.device.type) for t in tensors]
    for connection in connections:
        connection.send((structure, headers))
    for tensor in tensors:
        _broadcast(tensor)


def receive_call(message: tuple[bytes, list[TensorHeader]], device: torch.device) -> Any:
    """What rank 0 sent. For the other ranks.

    Args:
        message: from the pipe.
        device: of this rank; tensors that rank 0 has on the CPU come to the CPU.
    """
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
