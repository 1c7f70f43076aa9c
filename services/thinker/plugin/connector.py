"""A KV connector, used for its hooks: it transfers no keys or values, but rows of the RowStore.

The scheduler's half knows the positions of a step and their slots. The worker's half sends their rows after the forward
pass.
"""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.utils.torch_utils import async_tensor_h2d

from services.thinker.plugin.row_channel import RowSender
from services.thinker.plugin.rows import RowKind, RowRequest, RowStore

log = structlog.get_logger()

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass(frozen=True)
class PluginSettings:
    """What the front end tells the plugin, as `kv_connector_extra_config`. `address` is the RowReceiver's."""

    kinds: tuple[RowKind, ...]
    address: str

    def to_vllm(self) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector=RowConnector.__name__,
            kv_connector_module_path=RowConnector.__module__,
            kv_role="kv_producer",
            kv_connector_extra_config=asdict(self),
        )


def settings_of(vllm_config: VllmConfig) -> PluginSettings | None:
    """The plugin's settings; None: vLLM runs without the connector."""
    config = vllm_config.kv_transfer_config
    if config is None or config.kv_connector != RowConnector.__name__:
        return None
    extra = config.kv_connector_extra_config
    return PluginSettings(tuple(RowKind(**kind) for kind in extra["kinds"]), extra["address"])


@dataclass(frozen=True)
class Gather:
    """Rows to send after a step: `slots` ((n) int64) hold positions `first_position` to `first_position + n`."""

    key: int
    first_position: int
    slots: np.ndarray


@dataclass
class StepGathers(KVConnectorMetadata):
    """From the scheduler's half to the worker's half, by name of the rows."""

    gathers: dict[str, list[Gather]] = field(default_factory=dict)


@dataclass
class _Progress:
    request: RowRequest
    next_position: int = 0  # everything before it was gathered


class RowConnector(KVConnectorBase_V1, SupportsHMA):
    """Sends the rows that requests ask for in their `extra_args` (see `RowRequest`).

    Each row is sent once, after the first step that computes its position. A preempted request computes positions
    again, without sending them.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = settings_of(vllm_config)
        assert settings is not None
        self._settings = settings
        self._block_size = vllm_config.cache_config.block_size
        self._progress: dict[str, _Progress] = {}
        self._sender: RowSender | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: rows are sent in the step that computes them, so a preemption loses nothing."""
        return False

    # Scheduler's half

    def on_new_request(self, request: "Request") -> None:
        if request.sampling_params and (rows := RowRequest.from_extra_args(request.sampling_params.extra_args)):
            self._progress[request.request_id] = _Progress(rows)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepGathers:
        step = StepGathers()
        blocks = scheduler_output.kv_connector_block_state
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            progress = self._progress.get(request_id)
            if progress is None:
                continue
            end = computed[request_id] + scheduled
            wanted = progress.request.between(progress.next_position, end)
            progress.next_position = max(progress.next_position, end)
            if wanted:
                assert blocks is not None
                (block_ids,) = blocks.resolve_block_ids(request_id)  # one KV cache group
                block_table = np.asarray(block_ids, dtype=np.int64)
                for name, (first, past) in wanted:
                    at = np.arange(first, past, dtype=np.int64)
                    slots = block_table[at // self._block_size] * self._block_size + at % self._block_size
                    step.gathers.setdefault(name, []).append(Gather(progress.request.key, first, slots))
        return step

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._progress.pop(request.request_id, None)
        return False, None

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None: ...

    # Worker's half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if get_tensor_model_parallel_rank() > 0:
            return  # after the layer's all-reduce every rank has the same states: the first one keeps them
        RowStore.installed = rows = RowStore(
            num_slots=self._kv_cache_config.num_blocks * self._block_size,
            kinds=self._settings.kinds,
            model_dtype=self._vllm_config.model_config.dtype,
            device=next(iter(kv_caches.values())).device,
        )
        self._sender = RowSender(self._settings.address)
        log.info(
            "memory of the KV cache",
            slots=rows.num_slots,
            kv_bytes=sum(cache.nbytes for cache in kv_caches.values()),
            rows_bytes=rows.size_bytes,
        )

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepGathers)
        rows = RowStore.installed
        if self._sender is None or rows is None:
            return
        for name, gathers in metadata.gathers.items():
            # From pinned memory: else the engine's thread would wait here for the whole step.
            slots = async_tensor_h2d(np.concatenate([gather.slots for gather in gathers]), rows.device)
            parts = [(gather.key, gather.first_position, len(gather.slots)) for gather in gathers]
            self._sender.send(name, parts, rows.read(name, slots))

    def shutdown(self) -> None:
        if self._sender:
            self._sender.close()
        RowStore.installed = None

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...
