"""What a checkpoint needs of a GPU."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.families import DTYPE_BYTES, STAGES, Sizes, kv_bytes, weight_bytes, weights_dtype

STATE_LAYERS = 1  # that which the talker reads; --keep-embeddings would be another one
ROPE_BYTES = 3 * 4  # position of a token in time, height and width, int32
UNSPLIT = "thinker.audio_tower."  # its 20 heads do not go into 8 parts


def sizes(config: Mapping[str, Any], tensors: Iterable[tuple[str, int]]) -> Sizes:
    """Those of a checkpoint with `config` and (name, bytes) of its tensors. Raises KeyError: a key is missing."""
    tensors = list(tensors)
    thinker, talker = config["thinker_config"]["text_config"], config["talker_config"]["text_config"]
    element = DTYPE_BYTES[weights_dtype(config)]
    return Sizes(
        weights={stage: weight_bytes(tensors, f"{stage}.") for stage in STAGES},
        unsplit=weight_bytes(tensors, UNSPLIT),
        text_table=thinker["vocab_size"] * talker["hidden_size"] * element,
        heads=thinker["num_attention_heads"],
        kv_heads=thinker["num_key_value_heads"],
        kv_per_token=kv_bytes(thinker, element),
        states_per_token=STATE_LAYERS * thinker["hidden_size"] * element + ROPE_BYTES,
        talker_kv_per_position=kv_bytes(talker, element),
    )


# Qwen3-Omni-30B-A3B-Instruct in bfloat16: sums over its architecture at its config's sizes; 31.7, 3.3 and 0.2 billion
# parameters.
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
