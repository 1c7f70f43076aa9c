"""Which path the talker's steps take on this device, and why."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from services.common.engine.device import Accelerator, Choice, captures
from services.talker.attention import SDPA, CacheAttention
from services.talker.config import TalkerSettings
from services.talker.moe import RunExperts, grouped_experts, static_experts
from services.talker.steps import TORCH, StepKernels
from services.talker.varlen import in_place_attention

# Compute capabilities, by their major number, for which torch has a kernel for grouped products of bfloat16 matrices.
# For others, and other dtypes, it copies the groups' ends to the host, which no graph can hold (torch 2.13).
_GROUPED_KERNEL_MAJORS = (9, 10)


def compiles_predictor(compile: str, accelerator: Accelerator | None) -> bool:
    """Whether the code predictor is compiled, which takes a CPU a minute and a C++ compiler."""
    return accelerator is None and compile == "on"


def experts(accelerator: Accelerator | None, dtype: str) -> RunExperts:
    """How experts run on `accelerator` (None: a CPU) in `dtype`, a name as "bfloat16"."""
    if accelerator is None or (dtype == "bfloat16" and accelerator.has_major(*_GROUPED_KERNEL_MAJORS)):
        return grouped_experts
    return static_experts


def _triton_lacks() -> str | None:
    """What Triton needs to compile kernels on this machine and is not there; None: nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler: install gcc"
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return None if has_headers else "Triton needs Python's headers: install python3-dev"


def _lacks_for_fusing(compile: str, accelerator: Accelerator | None) -> str | None:
    """Why steps run by torch's kernels; None: by those of `services.talker.kernels`."""
    if not captures(compile, accelerator):
        return "--compile=off"  # eagerly, a start by Triton costs as much as several by torch
    if accelerator is None or accelerator.gfx:
        return "ours have run on no GPU of AMD"
    return _triton_lacks()


def step_kernels(compile: str, accelerator: Accelerator | None) -> StepKernels:
    """What a step calls between its matrix products. `compile` is the setting."""
    if _lacks_for_fusing(compile, accelerator):
        return TORCH
    from services.talker.kernels.stack import FUSED  # Triton is there with CUDA only

    return FUSED


def lacks_in_place(compile: str, accelerator: Accelerator | None, dtype: str) -> str | None:
    """Why attention to the cache is torch's SDPA; None: it looks at the cache in place, wherever a slot ends.

    Prompts do by torch's flash attention, steps by a kernel of ours.
    """
    if accelerator is not None and not accelerator.gfx and accelerator.capability < (8, 0):
        return "flash attention needs sm_80"
    if dtype not in ("bfloat16", "float16"):
        return f"flash attention has no {dtype}"
    return _lacks_for_fusing(compile, accelerator)


def cache_attention(lack: str | None) -> CacheAttention:
    """`lack` is that of `lacks_in_place`, or what a probe on the device found (`varlen.refusal`)."""
    if lack:
        return SDPA
    from torch.nn.attention.varlen import varlen_attn  # takes seconds to import

    from services.talker.kernels.attention import InPlaceDecode

    return in_place_attention(varlen_attn, InPlaceDecode)


def choices(
    settings: TalkerSettings, accelerator: Accelerator | None, dtype: str, refused: str | None = None
) -> tuple[Choice, ...]:
    """`refused` is what a probe on the device has against attention in place."""
    if accelerator is None:
        step = Choice("step", "eager", "a CPU without --compile=on")
        if compiles_predictor(settings.compile, accelerator):
            step = Choice("step", "compiled code predictor", "--compile=on")
        moe = Choice("moe", "grouped matrix products", "a CPU loops over them without waiting")
        return step, moe, Choice("attention", "torch's for CPUs", "there is one")
    step = Choice("step", "eager", "--compile=off")
    if captures(settings.compile, accelerator):
        step = Choice("step", "CUDA graphs", "all shapes of a step are captured at start")
    where = f"{accelerator.architecture} in {dtype}"
    moe = Choice("moe", "static matrix products", f"torch's grouped products wait for the host on {where}")
    if experts(accelerator, dtype) is grouped_experts:
        moe = Choice("moe", "grouped matrix products", f"torch has a kernel for {where}")
    lack = _lacks_for_fusing(settings.compile, accelerator)
    kernels = Choice("kernels", "torch's" if lack else "fused (Triton)", lack or "--compile=off is without them")
    lack = lacks_in_place(settings.compile, accelerator, dtype) or refused
    attention = Choice("attention", "over the cache in place", "if it agrees with SDPA at the start")
    if lack:
        attention = Choice("attention", "SDPA: flash, memory-efficient", f"not over the cache in place: {lack}")
    return step, moe, kernels, attention
