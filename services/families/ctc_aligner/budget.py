"""GPU memory of a checkpoint."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.sizes import Sizes

# Live tensors of the net that comes along take 387,000 bytes for a second of sound, most of them for its spectrogram.
_STEP_BYTES_PER_S = 500_000


def sizes(config: Mapping[str, Any], tensors: Iterable[tuple[str, int]]) -> Sizes:
    """Sizes of an aligner.

    Args:
        config: config.json.
        tensors: (name, bytes) of each.
    """
    return Sizes(weights={"aligner": sum(size for _, size in tensors)}, sound_step_per_s=_STEP_BYTES_PER_S)
