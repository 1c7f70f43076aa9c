"""GPU memory of a checkpoint."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.registry import STAGES, has_speech
from services.sizes import ROPE_BYTES, STATE_LAYERS, Sizes, omni_sizes

UNSPLIT = "thinker.audio_tower."  # its 20 heads do not go into 8 parts


def sizes(config: Mapping[str, Any], tensors: Iterable[tuple[str, int]]) -> Sizes:
    """Sizes of a checkpoint from its config and (name, bytes) of its tensors. Raises KeyError: a key is missing."""
    talker = config["talker_config"]["text_config"] if has_speech(config) else None
    return omni_sizes(config, talker, tensors, {stage: f"{stage}." for stage in STAGES}, UNSPLIT)


# Qwen3-Omni-30B-A3B-Instruct in bfloat16, summed over its architecture: 31.7, 3.3 and 0.2 billion parameters.
PUBLISHED = Sizes(
    weights={"thinker": 63_438_410_976, "talker": 6_649_192_960, "code2wav": 432_033_154},
    unsplit=1_295_854_336,
    text_table=152_064 * 1024 * 2,
    heads=32,
    kv_heads=4,
    kv_per_token=96 * 1024,
    states_per_token=STATE_LAYERS * 2048 * 2 + ROPE_BYTES,
    talker_kv_per_position=20 * 1024,
)
