"""GPU memory of a checkpoint."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from services.sizes import DTYPE_BYTES, Sizes, omni_sizes, weights_dtype

PREFIXES = {"thinker": "thinker.", "talker": "talker.", "code2wav": "token2wav."}
# Of token2wav beside its weights: matrices that the start merges, and CUDA graphs of some 3,000 kernels for each number
# of streams and steps of the solver.
_TOKEN2WAV_BYTES = 700 * 1024**2


def sizes(config: Mapping[str, Any], tensors: Iterable[tuple[str, int]]) -> Sizes:
    """As `omni_sizes`; token2wav computes in float32, whatever the checkpoint stores."""
    stored = omni_sizes(config, tensors, PREFIXES)
    if not stored.weights.get("code2wav"):
        return stored
    computed = stored.weights["code2wav"] * DTYPE_BYTES["float32"] // DTYPE_BYTES[weights_dtype(config)]
    return replace(stored, weights={**stored.weights, "code2wav": computed + _TOKEN2WAV_BYTES})
