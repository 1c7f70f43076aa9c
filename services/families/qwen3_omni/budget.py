"""GPU memory of a checkpoint."""

from functools import partial

from services.registry import STAGES
from services.sizes import ROPE_BYTES, STATE_LAYERS, Sizes, omni_sizes

sizes = partial(omni_sizes, prefixes={stage: f"{stage}." for stage in STAGES})
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
    max_context_tokens=65_536,
    adapted={
        layer: (48 * 2 * whole, 48 * 2 * split)
        for layer, whole, split in (
            ("qkv_proj", 3 * 2048, 40 * 128),
            ("o_proj", 2048, 32 * 128),
            ("gate", 2048 + 128, 0),
            ("experts", 128 * 2 * 2048, 128 * 3 * 768),
        )
    },
)
