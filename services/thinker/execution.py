"""Which paths the thinker's computations take, and the settings as vLLM's arguments."""

import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from services.common.engine.device import Accelerator, Choice
from services.common.engine.weights import stored_tensors
from services.common.errors import InvalidInput
from services.common.sampling_limits import WHOLE_VOCABULARY
from services.registry import family_of, read_config
from services.sizes import Sizes
from services.thinker import device
from services.thinker.config import ThinkerSettings
from services.thinker.family import ThinkerCheckpoint
from services.thinker.lora_targets import adapted_layers
from services.thinker.request import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig

EAGER = "eager"
_PACKED = ("awq", "gptq")  # four bits a weight, eight weights in an int32
MIN_CAPABILITY = {"bfloat16": (8, 0), "float32": (7, 5), "float16": (7, 5)}
_BATCHED_TOKENS_ON_CPU = 128
_MEDIUM_TOKENS_ON_CPU = 2048  # a step by vLLM's own default: the media of a step are encoded together
_LONG_PREFILL_TOKENS = 512  # of a prompt in a step, beside others: fewer would leave a GPU idle
_TOO_LARGE_MEDIUM = re.compile(r"a\(n\) (\w+) item with (\d+) embedding tokens, .* encoder cache size (\d+)")
# Of a CPU's KV cache: vLLM fills it with zeros at the start, and a small model cannot use so many tokens.
MOST_KV_CACHE_BYTES_ON_CPU, MOST_KV_CACHE_TOKENS_ON_CPU = 1024**3, 65_536


def choices(settings: ThinkerSettings, accelerator: Accelerator | None, dtype: str) -> list[Choice]:
    """Every decision. `accelerator` None is a CPU; `dtype` is "bfloat16", ..."""
    where, ranks = "GPU" if accelerator else "CPU process", settings.tensor_parallel_size
    split = f"one {where}" if ranks == 1 else f"tensor parallel over {ranks}"
    return [
        step(settings, accelerator, dtype),
        Choice("split", split, f"tensor_parallel_size is {ranks}"),
        _runner(accelerator),
        attention(accelerator, dtype),
        sampler(accelerator),
        Choice("states", "the talker's layer, on rank 0", "they are the same on all ranks"),
    ]


def step(settings: ThinkerSettings, accelerator: Accelerator | None, dtype: str) -> Choice:
    """Whether the forward pass is compiled and captured."""
    if accelerator and accelerator.capability < MIN_CAPABILITY[dtype]:
        least = ".".join(map(str, MIN_CAPABILITY[dtype]))
        reason = f"{dtype} needs compute capability {least}, {accelerator.name} is {accelerator.architecture}"
        return Choice("step", "none", f"{reason}; give --dtype float16", fatal=True)
    compiled = "compiled, CUDA graphs" if accelerator else "compiled"
    if settings.compile != "auto":
        path = EAGER if settings.compile == "off" else compiled
        return Choice("step", path, f"--compile={settings.compile}")
    if accelerator is None:
        return Choice("step", EAGER, "compiling takes a CPU a minute; --compile=on does")
    return Choice("step", compiled, "the default on a GPU")


def _runner(accelerator: Accelerator | None) -> Choice:
    if forced := os.environ.get("VLLM_USE_V2_MODEL_RUNNER"):
        version = "V2" if forced.lower() in ("1", "true") else "V1"
        return Choice("runner", version, f"VLLM_USE_V2_MODEL_RUNNER={forced}")
    if accelerator or importlib.metadata.entry_points(group="triton.backends", name="cpu"):
        return Choice("runner", "V2", "vLLM's default with Triton")
    return Choice("runner", "V1", "V2 needs Triton, which has no backend for CPUs here")


def attention(accelerator: Accelerator | None, dtype: str) -> Choice:
    """vLLM's backend of the language model's attention."""
    if accelerator is None:
        return Choice("attention", "CPU_ATTN", "vLLM's only one for CPUs")
    if accelerator.gfx:
        return Choice("attention", "vLLM's choice", f"on {accelerator.gfx}, where no stage has run")
    if dtype == "float32" or accelerator.capability < (8, 0):
        return Choice("attention", "TRITON_ATTN", f"FlashAttention has no {dtype} on {accelerator.architecture}")
    if forced := forced_attention(accelerator, dtype):
        return Choice("attention", forced, "FlashInfer, vLLM's choice here, has no kernels: no flashinfer-jit-cache")
    path = "FLASHINFER" if _prefers_flashinfer(accelerator, dtype) else "FLASH_ATTN"
    return Choice("attention", path, f"vLLM's choice on {accelerator.architecture}")


def forced_attention(accelerator: Accelerator | None, dtype: str) -> str | None:
    """The backend instead of vLLM's choice, which does not ask whether FlashInfer has kernels; None: vLLM chooses."""
    return "FLASH_ATTN" if _prefers_flashinfer(accelerator, dtype) and not device.has_flashinfer_kernels() else None


def _prefers_flashinfer(accelerator: Accelerator | None, dtype: str) -> bool:
    return accelerator is not None and accelerator.has_major(10) and dtype != "float32"


def sampler(accelerator: Accelerator | None) -> Choice:
    """What draws tokens under top_k and top_p."""
    if accelerator is None or accelerator.gfx:
        return Choice("sampler", "native", "FlashInfer is for CUDA")
    requested = os.environ.get(device.SAMPLER_VARIABLE)
    if requested == "0":
        return Choice("sampler", "native", f"{device.SAMPLER_VARIABLE}=0")
    if device.has_flashinfer_kernels():
        return Choice("sampler", "FlashInfer", "its kernels are at hand")
    if requested is None:
        return Choice("sampler", "native", "FlashInfer has no kernels: no flashinfer-jit-cache")
    if lacks := device.flashinfer_compiler_missing():
        reason = f"{device.SAMPLER_VARIABLE}={requested}, but FlashInfer cannot compile its kernels: {lacks}; unset it"
        return Choice("sampler", "FlashInfer", reason, fatal=True)
    reason = f"{device.SAMPLER_VARIABLE}={requested}: it compiles its kernels when they are first used, for minutes"
    return Choice("sampler", "FlashInfer", reason)


def has_amx() -> bool:
    """Whether vLLM takes its kernels for AMX here."""
    return torch.cpu._is_amx_tile_supported()


def refused_on_cpu(config: Mapping[str, Any], folder: Path, dtype: str, amx: bool) -> str | None:
    """Why a CPU cannot run the thinker of the checkpoint in `folder`, and what can; None: nothing is known against it.

    `dtype` is that of all that is not quantized.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method = str(quantization.get("quant_method", ""))
    instead = "take a GPU, or a checkpoint of compressed-tensors (int8, FP8) whose experts are not quantized"
    if method.startswith(_PACKED):
        return f"the weights are {method.upper()}, which vLLM's build for CPUs has no kernels for; {instead}"
    stored = (tensor.name for tensor in stored_tensors(folder) if tensor.dtype == "I8")
    int8 = [name for name in stored if name.startswith("thinker.")]
    if any(".experts." in name for name in int8):
        return f"the experts are int8, which vLLM has no kernels for on CPUs; {instead}"
    if int8 and amx and dtype == "float32":
        return "the weights are int8, for which vLLM's kernels for this CPU's AMX take no float32; set --dtype=bfloat16"
    return None


def compute_dtype(settings: ThinkerSettings, checkpoint: ThinkerCheckpoint) -> str:
    """Dtype to compute in: vLLM's own "auto" would run a float32 checkpoint in bfloat16."""
    return checkpoint.dtype if settings.dtype == "auto" else settings.dtype


def engine_args(
    settings: ThinkerSettings, checkpoint: ThinkerCheckpoint, row_address: str, accelerator: Accelerator | None
) -> "AsyncEngineArgs":
    """Arguments for AsyncLLM.

    Args:
        row_address: where the plugin sends rows to.
        accelerator: the first GPU that vLLM will run on; None: it runs on CPUs.
    """
    from vllm import AsyncEngineArgs
    from vllm.config import StructuredOutputsConfig

    from services.thinker.plugin.connector import PluginSettings
    from services.thinker.plugin.recording import OneProcess, Processes
    from services.thinker.recorder import profiler_config

    on_cpu = accelerator is None
    batched_tokens, long_tokens = settings.max_batched_tokens, 1
    if not checkpoint.splits_media:
        long_tokens = 0  # a step has a whole picture, or waits for ever
    elif on_cpu:
        batched_tokens = batched_tokens or max(_BATCHED_TOKENS_ON_CPU, settings.max_running_requests)
    else:
        long_tokens = min(_LONG_PREFILL_TOKENS, settings.max_context_tokens or _LONG_PREFILL_TOKENS)
    dtype, rows = compute_dtype(settings, checkpoint), checkpoint.row_kinds()
    return AsyncEngineArgs(
        model=str(checkpoint.folder),
        served_model_name=settings.model_name,
        dtype=dtype,  # type: ignore[arg-type]
        # -1: the model's, or what the KV cache holds if that is less
        max_model_len=settings.max_context_tokens or -1,
        max_num_seqs=settings.max_running_requests,
        max_num_batched_tokens=batched_tokens,
        # without a limit of one prompt, a long one takes all of each step, and requests behind it wait for its end
        long_prefill_token_threshold=long_tokens,
        long_prefill_token_threshold_adaptive=long_tokens > 0,  # but at least its share of a step, among all requests
        block_size=settings.block_size,
        kv_cache_memory_bytes=settings.kv_cache_bytes or (_kv_cache_bytes(settings, checkpoint) if on_cpu else None),
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel_size,
        distributed_executor_backend=OneProcess if settings.tensor_parallel_size == 1 else Processes,
        enable_prefix_caching=_caches_prefixes(settings, checkpoint, on_cpu),
        enforce_eager=step(settings, accelerator, dtype).path == EAGER,
        attention_backend=forced_attention(accelerator, dtype),  # type: ignore[arg-type]
        limit_mm_per_prompt=_most_media(settings, checkpoint),
        mm_processor_cache_gb=0,  # a sound's features depend on the others of its request
        # Profiling runs the encoders on the largest image and video there can be, which takes minutes on a CPU.
        skip_mm_profiling=on_cpu,
        kv_transfer_config=PluginSettings(rows, row_address).to_vllm() if rows else None,
        use_tqdm_on_load=False,  # a bar is no log line
        profiler_config=profiler_config(),
        max_logprobs=WHOLE_VOCABULARY if settings.vocabulary_logprobs else MAX_TOP_LOGPROBS,
        scheduling_policy="priority",  # of equal priorities the one that came first, as without
        # models with a grammar to follow are prone to endless whitespace
        structured_outputs_config=StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True),
        # by it a structure begins after the thought, and a thought's budget ends it
        reasoning_parser=checkpoint.reasoning.vllm_parser if checkpoint.reasoning else "",
        **checkpoint.engine_args(on_cpu),
        **_lora_args(settings, on_cpu),
    )


def make_room_for_media(config: "VllmConfig") -> None:
    """Lets a picture, sound or video have more tokens than a step, if the model can read it in several: vLLM's room for
    one is by default that of a step, which is short on a CPU."""
    if config.model_config.is_encoder_decoder:  # it reserves what its encoder may take for each request
        return
    scheduler = config.scheduler_config
    if config.model_config.is_mm_prefix_lm:  # a picture is read in one step; vLLM sees to that on GPUs alone
        scheduler.disable_chunked_mm_input = True
        return
    room = min(_MEDIUM_TOKENS_ON_CPU, config.model_config.max_model_len)
    scheduler.encoder_cache_size = max(scheduler.encoder_cache_size, room)
    scheduler.max_num_encoder_input_tokens = max(scheduler.max_num_encoder_input_tokens, room)


def too_large_medium(error: Exception) -> InvalidInput | None:
    """vLLM's refusal of a picture, sound or video that its room for one does not hold, in the request's terms."""
    found = _TOO_LARGE_MEDIUM.search(str(error))
    if found is None:
        return None
    kind, tokens, room = found.groups()
    reason = f"its {kind} has {tokens} tokens, and one may have {room} here; send a smaller or shorter one"
    return InvalidInput("messages", reason)


def _caches_prefixes(settings: ThinkerSettings, checkpoint: ThinkerCheckpoint, on_cpu: bool) -> bool | None:
    """None: if the model can; vLLM takes True for an order. On a CPU its kernels keep no states for it."""
    can = settings.enable_prefix_caching and not (checkpoint.keeps_state and on_cpu)
    return None if can else False


def _most_media(settings: ThinkerSettings, checkpoint: ThinkerCheckpoint) -> dict[str, Any]:
    most = {
        "image": settings.max_images,
        "audio": settings.max_audios + settings.max_videos,  # a video's sound track counts as audio
        "video": settings.max_videos,
    }
    return {kind: most[kind] if kind in checkpoint.placeholders else 0 for kind in most}


def _kv_cache_bytes(settings: ThinkerSettings, checkpoint: ThinkerCheckpoint) -> int:
    """The default on a CPU."""
    config = read_config(checkpoint.folder)
    family = family_of(config)
    if not family.has("budget"):
        return MOST_KV_CACHE_BYTES_ON_CPU
    try:
        sizes: Sizes = family.part("budget").sizes(config, ())
    except (KeyError, ValueError):  # config.json leaves out a default of its class
        return MOST_KV_CACHE_BYTES_ON_CPU
    tokens = max(MOST_KV_CACHE_TOKENS_ON_CPU, settings.max_context_tokens or 0)
    return min(MOST_KV_CACHE_BYTES_ON_CPU, tokens * sizes.kv_per_token)


def _lora_args(settings: ThinkerSettings, on_cpu: bool) -> dict[str, Any]:
    if not settings.takes_adapters:
        return {}
    most = max(settings.max_cpu_loras, settings.max_loras)
    # On a CPU vLLM gives a request without an adapter that of the last place. So there is one more than can be loaded:
    # it stays empty. Adapters that wait for a place lie in the same memory there anyway.
    return {
        "enable_lora": True,
        "max_lora_rank": settings.max_lora_rank,
        "max_loras": most + 1 if on_cpu else settings.max_loras,
        "max_cpu_loras": most + 1 if on_cpu else most,
        "lora_target_modules": adapted_layers(settings, on_cpu=on_cpu),
    }
