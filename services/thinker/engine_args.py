"""The thinker's settings as vLLM's arguments."""

from typing import TYPE_CHECKING, Any

from services.common.engine.execution import Accelerator
from services.thinker import execution
from services.thinker.config import ThinkerSettings
from services.thinker.family import ThinkerCheckpoint
from services.thinker.plugin.rows import RowKind
from services.thinker.sampling import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.config import KVTransferConfig

KV_CACHE_BYTES_ON_CPU = 1024**3


def compute_dtype(settings: ThinkerSettings, checkpoint: ThinkerCheckpoint) -> str:
    """Dtype to compute in: vLLM's own "auto" would run a float32 checkpoint in bfloat16."""
    return (checkpoint.dtype or "bfloat16") if settings.dtype == "auto" else settings.dtype


def engine_args(
    settings: ThinkerSettings, checkpoint: ThinkerCheckpoint, row_address: str, accelerator: Accelerator | None
) -> "AsyncEngineArgs":
    """Arguments for AsyncLLM.

    Args:
        settings: the thinker's settings.
        checkpoint: facts of the model.
        row_address: where the plugin sends rows to.
        accelerator: the first GPU that vLLM will run on; None: it runs on CPUs.
    """
    from vllm import AsyncEngineArgs

    from services.thinker.plugin.executor import OneProcess, Processes

    on_cpu = accelerator is None
    dtype = compute_dtype(settings, checkpoint)
    optional: dict[str, Any] = {
        "max_num_batched_tokens": settings.max_batched_tokens,
        "block_size": settings.block_size,
        "kv_cache_memory_bytes": settings.kv_cache_bytes or (KV_CACHE_BYTES_ON_CPU if on_cpu else None),
    }
    return AsyncEngineArgs(
        model=str(checkpoint.folder),
        served_model_name=settings.model_name,
        dtype=dtype,  # type: ignore[arg-type]
        # -1: the model's, or what the KV cache holds if that is less
        max_model_len=settings.max_context_tokens or -1,
        max_num_seqs=settings.max_running_requests,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel_size,
        distributed_executor_backend=OneProcess if settings.tensor_parallel_size == 1 else Processes,
        enable_prefix_caching=settings.enable_prefix_caching,
        enable_chunked_prefill=True,
        enforce_eager=execution.step(settings, accelerator, dtype).path == execution.EAGER,
        attention_backend=execution.forced_attention(accelerator, dtype),  # type: ignore[arg-type]
        limit_mm_per_prompt=_most_media(settings, checkpoint),
        mm_processor_cache_gb=0,  # a sound's features depend on the others of its request
        # Profiling runs the encoders on the largest image and video there can be, which takes minutes on a CPU.
        skip_mm_profiling=on_cpu,
        kv_transfer_config=_row_connector(checkpoint.row_kinds(settings.keep_embeddings), row_address),
        use_tqdm_on_load=False,  # a bar is no log line
        max_logprobs=MAX_TOP_LOGPROBS,
        # Models with a grammar to follow are prone to endless whitespace.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},  # pyright: ignore[reportArgumentType]
        **{name: value for name, value in optional.items() if value is not None},
        **checkpoint.engine_args(on_cpu),
    )


def _most_media(settings: ThinkerSettings, checkpoint: ThinkerCheckpoint) -> dict[str, Any]:
    """How many media of each kind a prompt may have."""
    most = {
        "image": settings.max_images,
        "audio": settings.max_audios + settings.max_videos,  # a video's sound track counts as audio
        "video": settings.max_videos,
    }
    return {kind: most[kind] for kind in checkpoint.placeholders}


def _row_connector(kinds: tuple[RowKind, ...], row_address: str) -> "KVTransferConfig":
    """What makes vLLM's engine keep `kinds` of rows, and send those that are asked for to `row_address`."""
    from vllm.config import KVTransferConfig

    from services.thinker.plugin.connector import PluginSettings, RowConnector

    return KVTransferConfig(
        kv_connector=RowConnector.__name__,
        kv_connector_module_path=RowConnector.__module__,
        kv_role="kv_producer",
        kv_connector_extra_config=PluginSettings(kinds, row_address).to_extra_config(),
    )
