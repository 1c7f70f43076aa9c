"""Which device vLLM runs on, and whether FlashInfer can make its kernels here.

A build of vLLM runs on CPUs or on CUDA devices, never on either.
"""

import importlib.util
import os
import shutil
from pathlib import Path

from services.common.engine.device import Accelerator
from services.thinker.cpu import vllm_is_for_cpus

INSTALL = "pip install 'quartet[{}]'"
SAMPLER_VARIABLE = "VLLM_USE_FLASHINFER_SAMPLER"
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")


def visible_devices(
    requested: str, tensor_parallel_size: int, *, for_cpus: bool, cuda_devices: int, visible: str | None
) -> str | None:
    """What CUDA_VISIBLE_DEVICES must be for vLLM to run on the device `requested`; None: it may stay as it is.

    Args:
        requested: auto, cpu, cuda, or cuda:N, the Nth of the visible ones.
        for_cpus: whether vLLM is a CPU build.
        cuda_devices: number of visible ones.
        visible: CUDA_VISIBLE_DEVICES as it is.

    Raises:
        ValueError: vLLM cannot run there; names the setting and what to change.
    """
    kind, colon, number = requested.partition(":")
    if requested not in ("auto", "cpu", "cuda") and (kind != "cuda" or not number.isdecimal()):
        raise ValueError(f"device: {requested} is not one of auto, cpu, cuda, cuda:N")
    if for_cpus:
        if kind == "cuda":
            raise ValueError(f"device: {requested}, but this vLLM is built for CPUs; {INSTALL.format('thinker-cuda')}")
        return None
    if kind == "cpu":
        raise ValueError(f"device: cpu, but this vLLM is built for CUDA; {INSTALL.format('thinker-cpu')}")
    if colon and tensor_parallel_size > 1:
        raise ValueError(
            f"device: {requested} is one GPU, but tensor_parallel_size is {tensor_parallel_size}; "
            "give cuda, and choose the GPUs by CUDA_VISIBLE_DEVICES"
        )
    needed = int(number) + 1 if colon else tensor_parallel_size
    if needed > cuda_devices:
        raise ValueError(
            f"device: {requested} with tensor_parallel_size {tensor_parallel_size} needs {needed} CUDA devices, "
            f"of which {cuda_devices} are visible"
        )
    if not colon:
        return None
    return visible.split(",")[int(number)].strip() if visible else number


def accelerator() -> Accelerator | None:
    """The first GPU that vLLM will run on, by NVML: CUDA is left to the engine's process. None: a CPU.

    Imports vLLM: call `environment.configure` before.
    """
    if vllm_is_for_cpus():
        return None
    from vllm.platforms import current_platform

    capability, gfx = current_platform.get_device_capability(), ""
    assert capability is not None  # configure found the device
    if current_platform.is_rocm():
        from vllm.platforms.rocm import _GCN_ARCH

        gfx = _GCN_ARCH.partition(":")[0]
    return Accelerator(
        name=current_platform.get_device_name(),
        capability=(capability.major, capability.minor),
        memory_bytes=current_platform.get_device_total_memory(),
        gfx=gfx,
    )


def has_flashinfer_kernels() -> bool:
    """Whether FlashInfer has compiled kernels.

    Without, vLLM's sampler, and its attention on sm_100, would have them compiled when first used: for minutes, with as
    many compilers as there are cores.
    """
    return importlib.util.find_spec("flashinfer_jit_cache") is not None


def flashinfer_compiler_missing() -> str | None:
    """What FlashInfer lacks to compile kernels; None: nothing."""
    if not nvcc():
        return "no nvcc (CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda)"
    return None if shutil.which("ninja") else "no ninja on PATH"


def nvcc() -> str | None:
    """Path of the compiler that FlashInfer would run, which looks at no other place."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not home:
        on_path = shutil.which("nvcc")
        home = Path(on_path).parent.parent if on_path else DEFAULT_CUDA_HOME
    return shutil.which(f"{home}/bin/nvcc")
