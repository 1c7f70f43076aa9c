"""GPU memory of a checkpoint."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.sizes import DTYPE_BYTES, Sizes, weights_dtype

_CHANNELS, _BANDS = 480, 128  # of the published encoder
_FRAMES_PER_S = 50  # behind its first convolution
# Most is taken there, for all sounds of a step at once: what the convolution gives, and what its activation makes of it
# (by transformers' class, live tensors have at most 1.02 times these two). As much as one of them is for cuDNN.
_COPIES = 3


def sizes(config: Mapping[str, Any], tensors: Iterable[tuple[str, int]]) -> Sizes:
    """Sizes of an aligner.

    Args:
        config: config.json.
        tensors: (name, bytes) of each.
    """
    audio: Mapping[str, Any] = config.get("audio_config") or {}
    element = DTYPE_BYTES[weights_dtype(config)]
    row = audio.get("downsample_hidden_size", _CHANNELS) * (audio.get("num_mel_bins", _BANDS) + 1) // 2
    weights = sum(size for _, size in tensors)
    return Sizes(weights={"aligner": weights}, sound_step_per_s=_COPIES * row * _FRAMES_PER_S * element)
