"""The thinker's settings as vLLM's arguments."""

from typing import TYPE_CHECKING, Any

from services.thinker.checkpoint import Checkpoint
from services.thinker.config import ThinkerSettings
from services.thinker.sampling import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs

KV_CACHE_BYTES_ON_CPU = 1024**3


def engine_args(settings: ThinkerSettings, checkpoint: Checkpoint, row_address: str) -> "AsyncEngineArgs":
    """Arguments for AsyncLLM.

    Args:
        settings: the thinker's settings.
        checkpoint: facts of the model.
        row_address: where the plugin ships rows to.
    """
    import torch
    from vllm import AsyncEngineArgs
    from vllm.config import KVTransferConfig
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from services.thinker.plugin.connector import PluginSettings, RowConnector

    on_cpu = not torch.cuda.is_available()
    kv_cache_bytes = settings.kv_cache_bytes or (KV_CACHE_BYTES_ON_CPU if on_cpu else None)
    # Compiled M-RoPE changes what the model hears, so vLLM's own kernel is used (as vLLM-Omni does).
    compilation: dict[str, Any] = {} if on_cpu else {"custom_ops": ["+rotary_embedding"]}
    optional: dict[str, Any] = {
        "max_num_batched_tokens": settings.max_batched_tokens,
        "block_size": settings.block_size,
    }
    return AsyncEngineArgs(
        model=checkpoint.folder,
        served_model_name=settings.model_name,
        # vLLM's own "auto" would run a float32 checkpoint in bfloat16.
        dtype=checkpoint.dtype or "auto" if settings.dtype == "auto" else settings.dtype,  # type: ignore[arg-type]
        # -1: the model's, or what the KV cache holds if that is less
        max_model_len=settings.max_context_tokens or -1,
        max_num_seqs=settings.max_running_requests,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_bytes,
        tensor_parallel_size=settings.tensor_parallel_size,
        distributed_executor_backend=UniProcExecutor if on_cpu and settings.tensor_parallel_size == 1 else None,
        enable_prefix_caching=settings.enable_prefix_caching,
        enable_chunked_prefill=True,
        enforce_eager=on_cpu if settings.enforce_eager is None else settings.enforce_eager,
        limit_mm_per_prompt={
            "image": settings.max_images,
            "audio": settings.max_audios + settings.max_videos,  # a video's sound track counts as audio
            "video": settings.max_videos,
        },
        mm_processor_cache_gb=0,  # see plugin.processor
        # Profiling runs the encoders on the largest image and video there can be, which takes minutes on a CPU.
        skip_mm_profiling=on_cpu,
        compilation_config=compilation,  # pyright: ignore[reportArgumentType]
        kv_transfer_config=KVTransferConfig(
            kv_connector=RowConnector.__name__,
            kv_connector_module_path=RowConnector.__module__,
            kv_role="kv_producer",
            kv_connector_extra_config=PluginSettings(checkpoint.hidden_layers, row_address).to_extra_config(),
        ),
        max_logprobs=MAX_TOP_LOGPROBS,
        # Models with a grammar to follow are prone to endless whitespace.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},  # pyright: ignore[reportArgumentType]
        **{name: value for name, value in optional.items() if value is not None},
    )
