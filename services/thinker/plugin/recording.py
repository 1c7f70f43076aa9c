"""Keeping rows in vLLM: what its models need for it, and executors that leave room for the rows."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from services.thinker.plugin.connector import settings_of
from services.thinker.plugin.rows import RowStore, row_bytes

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


def record(rows: Sequence[torch.Tensor]) -> None:
    """Keeps the rows of a forward pass, (tokens, width) for each kind of the settings in order, in the process's
    RowStore. Keeps nothing in a run without a KV cache (memory profiling)."""
    mapping = get_forward_context().slot_mapping
    assert isinstance(mapping, dict)  # a list with micro-batches, which `execution.engine_args` does not ask for
    if mapping and (kept := RowStore.installed) is not None:
        # All layers of the language model are in one KV cache group and share their slots.
        kept.write(next(iter(mapping.values())), rows)


@contextmanager
def experts_without_adapters(vllm_config: VllmConfig) -> Iterator[None]:
    """For building a model. Where there can be adapters vLLM takes kernels for experts that apply them: Triton's, which
    no CPU has, or TensorRT-LLM's, which stop where experts have none. Experts without adapters keep their usual ones
    (see `services.thinker.lora_targets`)."""
    adapters = vllm_config.lora_config
    if adapters and "experts" not in (adapters.target_modules or ["experts"]):
        vllm_config.lora_config = None
    try:
        yield
    finally:
        vllm_config.lora_config = adapters


def kv_share(available_bytes: int, kv_bytes_per_slot: int, row_bytes_per_slot: int) -> int:
    """The KV cache's part of `available_bytes`, so that the rows of its slots fit beside it."""
    return available_bytes * kv_bytes_per_slot // (kv_bytes_per_slot + row_bytes_per_slot)


def leave_room(vllm_config: VllmConfig, specs: list[dict[str, "KVCacheSpec"]], available_bytes: list[int]) -> list[int]:
    """Memory of each rank for its KV cache. Rank 0 keeps the rows, and so has less."""
    settings = settings_of(vllm_config)
    if settings is None or vllm_config.cache_config.kv_cache_memory_bytes is not None:  # an exact size was requested
        return available_bytes
    rows = row_bytes(settings.kinds, vllm_config.model_config.dtype)
    first, *others = available_bytes
    return [kv_share(first, kv_bytes_per_slot(specs[0]), rows), *others]


def kv_bytes_per_slot(specs: Mapping[str, "KVCacheSpec"]) -> int:
    """Memory of one token's keys and values, of all layers, on one rank."""
    return sum(spec.page_size_bytes // spec.block_size for spec in specs.values())


class _LeavingRoom(Executor):
    """Leaves room for the RowStore beside the KV cache that vLLM sizes."""

    def determine_available_memory(self) -> list[int]:
        return leave_room(self.vllm_config, self.get_kv_cache_specs(), super().determine_available_memory())


class OneProcess(_LeavingRoom, UniProcExecutor):
    """The model runs in the engine's process."""

    def profile(self, is_start: bool = True, *options: Any, **more: Any) -> None:
        """Without vLLM's table of a CPU's operations, which would stop the engine for seconds."""
        super().profile(is_start, *options, **more)
        if is_start:
            self.driver_worker.worker.profiler.dump_cpu_time_total = False  # pyright: ignore  made by the start


class Processes(_LeavingRoom, MultiprocExecutor):
    """The model is split over processes."""
