"""Which paths the thinker's computations take. vLLM is told what it would choose otherwise, and what it cannot know."""

import importlib.metadata
import os

from services.common.engine.execution import Accelerator, Choice
from services.thinker import flashinfer
from services.thinker.config import ThinkerSettings

EAGER = "eager"
MIN_CAPABILITY = {"bfloat16": (8, 0), "float32": (7, 5), "float16": (7, 5)}


def choices(settings: ThinkerSettings, accelerator: Accelerator | None, dtype: str) -> list[Choice]:
    """Every decision, from settings, device (None: a CPU), dtype ("bfloat16", ...) and what is installed."""
    return [
        step(settings, accelerator, dtype),
        _split(settings, accelerator),
        _runner(accelerator),
        attention(accelerator, dtype),
        sampler(accelerator),
        _states(settings),
    ]


def step(settings: ThinkerSettings, accelerator: Accelerator | None, dtype: str) -> Choice:
    """Whether the forward pass is compiled and captured."""
    if accelerator and accelerator.capability < MIN_CAPABILITY[dtype]:
        least = ".".join(map(str, MIN_CAPABILITY[dtype]))
        reason = f"{dtype} needs compute capability {least}, {accelerator.name} is {accelerator.architecture}"
        return Choice("step", "none", f"{reason}; give --dtype float16", fatal=True)
    if settings.enforce_eager is not None:
        path = EAGER if settings.enforce_eager else _compiled(accelerator)
        return Choice("step", path, f"enforce_eager is {str(settings.enforce_eager).lower()}")
    if accelerator is None:
        return Choice("step", EAGER, "compiling takes a CPU a minute; enforce_eager=false compiles")
    return Choice("step", _compiled(accelerator), "the default on a GPU")


def _compiled(accelerator: Accelerator | None) -> str:
    return "compiled, CUDA graphs" if accelerator else "compiled"


def _split(settings: ThinkerSettings, accelerator: Accelerator | None) -> Choice:
    ranks = settings.tensor_parallel_size
    kind = "GPU" if accelerator else "CPU process"
    path = f"one {kind}" if ranks == 1 else f"tensor parallel over {ranks}"
    return Choice("split", path, f"tensor_parallel_size is {ranks}")


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
    if dtype == "float32" or accelerator.capability < (8, 0):
        return Choice("attention", "TRITON_ATTN", f"FlashAttention has no {dtype} on {accelerator.architecture}")
    if forced := forced_attention(accelerator, dtype):
        return Choice("attention", forced, f"FlashInfer, vLLM's choice here, has no kernels: {flashinfer.missing()}")
    path = "FLASHINFER" if _prefers_flashinfer(accelerator, dtype) else "FLASH_ATTN"
    return Choice("attention", path, f"vLLM's choice on {accelerator.architecture}")


def forced_attention(accelerator: Accelerator | None, dtype: str) -> str | None:
    """The backend that vLLM is to take instead of the one it would: it does not ask whether FlashInfer has kernels."""
    return "FLASH_ATTN" if _prefers_flashinfer(accelerator, dtype) and flashinfer.missing() else None


def _prefers_flashinfer(accelerator: Accelerator | None, dtype: str) -> bool:
    return accelerator is not None and accelerator.capability[0] == 10 and dtype != "float32"


def sampler(accelerator: Accelerator | None) -> Choice:
    """What draws tokens under top_k and top_p."""
    if accelerator is None:
        return Choice("sampler", "native", "FlashInfer is for CUDA")
    asked = os.environ.get(flashinfer.SAMPLER_VARIABLE)
    lacks = flashinfer.missing()
    if lacks:
        if asked not in (None, "0"):
            reason = f"{flashinfer.SAMPLER_VARIABLE}={asked}, but FlashInfer has no kernels: {lacks}; unset it"
            return Choice("sampler", "FlashInfer", reason, fatal=True)
        return Choice("sampler", "native", f"FlashInfer has no kernels: {lacks}")
    if asked == "0":
        return Choice("sampler", "native", f"{flashinfer.SAMPLER_VARIABLE}=0")
    return Choice("sampler", "FlashInfer", "its kernels are at hand")


def _states(settings: ThinkerSettings) -> Choice:
    layers = "the talker's layer and the embeddings" if settings.keep_embeddings else "the talker's layer"
    return Choice("states", f"{layers}, on rank 0", f"keep_embeddings is {str(settings.keep_embeddings).lower()}")
