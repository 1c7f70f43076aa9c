"""What the checkpoint and the machine allow, and how a process becomes a rank."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from services.common.engine.device import Accelerator, engine_device
from services.diffusion.families import DENOISERS, family_of
from services.diffusion.nets import pipeline_class
from services.diffusion.own import OwnPipeline
from services.dit.config import DitSettings
from services.dit.execution import devices

NO_LSE = frozenset({"native", "_native_npu"})  # they do not return what a ring's parts are put together by
GROUP_TIMEOUT_S = 60.0  # for what ranks do at about the same time, so only an error takes so long


def check(settings: DitSettings, folder: Path) -> None:
    """Raises ValueError if the checkpoint in `folder` or this machine does not fit `settings`."""
    flag, size, degrees = settings.parallelism, settings.parallel_devices, settings.context_parallel
    pipeline = pipeline_class(folder, settings.controlnet)
    if not family_of(pipeline).listed or issubclass(pipeline, OwnPipeline):
        raise ValueError(f"{flag}: how the calls of this pipeline are divided is not known; leave it out")
    index = json.loads((folder / "model_index.json").read_text())
    for name in DENOISERS:
        if not (folder / name).is_dir():
            continue
        cls = getattr(diffusers, index[name][1], None)
        if getattr(cls, "_cp_plan", None) is None:
            raise ValueError(f"{flag}: diffusers has no context-parallel plan for {index[name][1]}; leave it out")
        heads = json.loads((folder / name / "config.json").read_text())["num_attention_heads"]
        if heads % degrees.get("ulysses", 1):
            raise ValueError(f"{flag}: ulysses does not divide the {heads} attention heads of {name}")
    backend = (settings.attention_backend or "native").lower()
    is_ring = degrees.get("ring", 1) > 1
    supported = _AttentionBackendRegistry._supports_context_parallel - (NO_LSE if is_ring else set())
    if backend not in supported:
        raise ValueError(f"{flag}: attention_backend={backend} cannot do that; one of {sorted(supported)} can")
    on_cpu = settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available())
    if not on_cpu and settings.device not in ("auto", "cuda"):
        raise ValueError(f"{flag}: device={settings.device} is one device; say cuda, and pick by CUDA_VISIBLE_DEVICES")
    if not on_cpu and torch.cuda.device_count() < size:
        raise ValueError(f"{flag}: {size} CUDA devices are needed, and there are {torch.cuda.device_count()}")
    choice = devices(settings, Accelerator.of(engine_device(settings.device)))
    if choice.fatal:
        raise ValueError(choice.reason)


def join(settings: DitSettings, rank: int, store: Path, denoisers: list[Any]) -> None:
    """Makes this process `rank` of the group, and `denoisers` parts of all ranks'. Blocks until all have come.

    Args:
        store: a file that does not exist; the same for all ranks, which are on one machine.

    Raises:
        ValueError: diffusers refuses.
        RuntimeError: a rank did not come.
    """
    device, degrees = engine_device(settings.device), settings.context_parallel
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
    ulysses, ring = degrees.get("ulysses", 1), degrees.get("ring", 1)
    context = ContextParallelConfig(
        ulysses_degree=ulysses,
        ring_degree=ring,
        # any lengths of prompts and (not with gloo) of pictures; diffusers has that for either kind, not for both
        ulysses_anything=ring == 1,
        ring_anything=ulysses == 1,
    )
    config = ParallelConfig(context_parallel_config=context)
    mesh = init_device_mesh(device.type, context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config.setup(rank, settings.parallel_devices, device, mesh=mesh)
    for denoiser in denoisers:
        # diffusers' own would make a mesh for each model, and divides by the number of accelerators
        denoiser._resolve_parallel_config = lambda config, denoiser=denoiser: _use(denoiser, config)
        denoiser.enable_parallelism(config=config)


def _use(denoiser: Any, config: ParallelConfig) -> ParallelConfig:
    denoiser._parallel_config = config
    return config
