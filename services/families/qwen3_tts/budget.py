"""GPU memory of a checkpoint."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.families.qwen3_tts import FOLDER
from services.sizes import DTYPE_BYTES, Sizes, kv_bytes, weight_bytes, weights_dtype

# Of the published codec, in a folder of its own: the hub tells the sizes of tensors at a checkpoint's top only.
CODEC_BYTES = 690_000_000


def sizes(config: Mapping[str, Any], tensors: Iterable[tuple[str, int]]) -> Sizes:
    """Sizes of a talker and its codec.

    Args:
        config: config.json.
        tensors: (name, bytes) of each; names of the codec's begin with its folder.

    Raises:
        KeyError: a key is missing.
    """
    tensors, talker = list(tensors), config["talker_config"]
    element = DTYPE_BYTES[weights_dtype(config, talker)]
    speaks = weight_bytes(tensors, "talker.") + weight_bytes(tensors, "speaker_encoder.")
    return Sizes(
        weights={"talker": speaks, "code2wav": weight_bytes(tensors, f"{FOLDER}/") or CODEC_BYTES},
        text_table=talker["text_vocab_size"] * talker["hidden_size"] * element,
        talker_kv_per_position=kv_bytes(talker, element),
    )
