"""Keeping rows in vLLM: what its models need for it, and executors that leave room for the rows. Imports vLLM."""

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
    """Keeps the rows of a model's forward pass in the process's RowStore: for each kind of the settings, in order,
    (tokens, width). Nothing is kept in a run without a KV cache (memory profiling)."""
    mapping = get_forward_context().slot_mapping
    assert isinstance(mapping, dict)  # a list with micro-batches, which `execution.engine_args` does not ask for
    if mapping and (kept := RowStore.installed) is not None:
        # All layers of the language model are in one KV cache group and share their slots.
        kept.write(next(iter(mapping.values())), rows)


@contextmanager
def experts_of_cpus(vllm_config: VllmConfig) -> Iterator[None]:
    """While a model is built. Where there can be adapters vLLM takes Triton's kernels for experts, which no CPU has. On
    a CPU no adapter changes experts (see `services.thinker.lora_files`), so they can be what they are without."""
    adapters = vllm_config.lora_config
    if vllm_config.device_config.device_type == "cpu":
        vllm_config.lora_config = None
    try:
        yield
    finally:
        vllm_config.lora_config = adapters


def kv_share(available_bytes: int, kv_bytes_per_slot: int, row_bytes_per_slot: int) -> int:
    """What of `available_bytes` the KV cache gets, so that as many rows as it has slots fit beside it."""
    return available_bytes * kv_bytes_per_slot // (kv_bytes_per_slot + row_bytes_per_slot)


def leave_room(vllm_config: VllmConfig, specs: list[dict[str, "KVCacheSpec"]], available_bytes: list[int]) -> list[int]:
    """The memory that each rank has for its KV cache: rank 0, which keeps the rows, has less."""
    settings = settings_of(vllm_config)
    if settings is None or vllm_config.cache_config.kv_cache_memory_bytes is not None:  # an exact size was asked for
        return available_bytes
    rows = row_bytes(settings.kinds, vllm_config.model_config.dtype)
    first, *others = available_bytes
    return [kv_share(first, kv_bytes_per_slot(specs[0]), rows), *others]


def kv_bytes_per_slot(specs: Mapping[str, "KVCacheSpec"]) -> int:
    """Memory of one rank's keys and values of one token, of all layers."""
    return sum(spec.page_size_bytes // spec.block_size for spec in specs.values())


class _LeavingRoom(Executor):
    """Leaves room for the RowStore, which vLLM does not know, beside the KV cache that it sizes."""

    def determine_available_memory(self) -> list[int]:
        return leave_room(self.vllm_config, self.get_kv_cache_specs(), super().determine_available_memory())


class OneProcess(_LeavingRoom, UniProcExecutor):
    """The model runs in the engine's process."""

    def profile(self, is_start: bool = True, *options: Any, **more: Any) -> None:
        """Without vLLM's table of a CPU's operations: it would go to the log, in no format, and the engine would stand
        still for it for seconds."""
        super().profile(is_start, *options, **more)
        if is_start:
            self.driver_worker.worker.profiler.dump_cpu_time_total = False  # pyright: ignore  made by the start


class Processes(_LeavingRoom, MultiprocExecutor):
    """The model is split over processes."""
