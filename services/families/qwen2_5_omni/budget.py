"""GPU memory of a checkpoint."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from services.sizes import DTYPE_BYTES, Sizes, omni_sizes, weights_dtype

PREFIXES = {"thinker": "thinker.", "talker": "talker.", "code2wav": "token2wav."}
_LAYERS, _MODULATIONS = ".transformer_blocks.", ".attn_norm."
# Of token2wav beside its weights: matrices that the start merges. Then it drops the modulations' weights, 0.55 GB: room
# for CUDA graphs of some 3,000 kernels, one for each number of blocks.
_TOKEN2WAV_BYTES = 300 * 1024**2


def sizes(config: Mapping[str, Any], tensors: Iterable[tuple[str, int]]) -> Sizes:
    """As `omni_sizes`; whatever the checkpoint stores, token2wav computes in float32, and layers in bfloat16."""
    tensors = list(tensors)
    stored = omni_sizes(config, tensors, PREFIXES)
    if not stored.weights.get("code2wav"):
        return stored
    narrow = sum(size for name, size in tensors if _LAYERS in name and _MODULATIONS not in name)
    wide, element = stored.weights["code2wav"] - narrow, DTYPE_BYTES[weights_dtype(config)]
    computed = (narrow * DTYPE_BYTES["bfloat16"] + wide * DTYPE_BYTES["float32"]) // element
    return replace(stored, weights={**stored.weights, "code2wav": computed + _TOKEN2WAV_BYTES})
