"""Quantized weights that vLLM has no kernels for on a CPU. On a GPU vLLM itself says so."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from services.common.engine.weights import stored_tensors

_PACKED = ("awq", "gptq")  # four bits a weight, eight weights in an int32


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
