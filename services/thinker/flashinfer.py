"""Whether FlashInfer, which comes with vLLM's CUDA build as sources, can make its kernels on this machine."""

import importlib.util
import os
import shutil
from pathlib import Path

SAMPLER_VARIABLE = "VLLM_USE_FLASHINFER_SAMPLER"
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")


def missing() -> str | None:
    """What FlashInfer lacks to have kernels, or None where it has them: compiled ones, or the tools to compile them.

    vLLM's samplers (and its attention on sm_100) do not ask: they fail when a kernel is first used.
    """
    if importlib.util.find_spec("flashinfer_jit_cache"):
        return None
    if not nvcc():
        return "no flashinfer-jit-cache, and no nvcc (CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda)"
    if not shutil.which("ninja"):
        return "no flashinfer-jit-cache, and no ninja on PATH"
    return None


def nvcc() -> str | None:
    """Path of the compiler that FlashInfer would run: it looks at no other place. None: there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not home:
        on_path = shutil.which("nvcc")
        home = Path(on_path).parent.parent if on_path else DEFAULT_CUDA_HOME
    return shutil.which(f"{home}/bin/nvcc")
