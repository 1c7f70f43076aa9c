"""Quantized weights that vLLM has no kernels for on a CPU. On a GPU vLLM says itself what it cannot load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.engine.weights import stored_tensors

_PACKED = ("awq", "gptq")  # four bits a weight, eight weights in an int32


def refused_on_cpu(config: Mapping[str, Any], folder: Path) -> str | None:
    """Why a CPU cannot run the thinker of a checkpoint, and what can; None if nothing is known against it.

    Args:
        config: its config.json.
        folder: the checkpoint.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method = str(quantization.get("quant_method", ""))
    instead = "take a GPU, or a checkpoint of compressed-tensors (int8, FP8) whose experts are not quantized"
    if method.startswith(_PACKED):
        return f"the weights are {method.upper()}, which vLLM's build for CPUs has no kernels for; {instead}"
    int8 = (tensor.name for tensor in stored_tensors(folder) if tensor.dtype == "I8")
    if any(name.startswith("thinker.") and ".experts." in name for name in int8):
        return f"the experts are int8, which vLLM has no kernels for on CPUs; {instead}"
    return None
