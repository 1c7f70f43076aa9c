"""What the stages of a checkpoint need of a GPU, as a family's `budget` reads it from its config and tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STAGES = ("thinker", "talker", "code2wav")


@dataclass(frozen=True)
class Sizes:
    """Bytes, where nothing else is said.

    Attributes:
        weights: of each stage.
        unsplit: those of the thinker's weights that tensor parallelism may leave whole on every GPU.
        text_table: the thinker's embeddings of all text tokens as the talker projects them once, when it loads.
        heads, kv_heads: number of heads of the thinker's attention.
        kv_per_token: key-value memory of a token of the thinker's context, of all heads.
        states_per_token: what the thinker keeps besides of each token of its key-value cache.
        talker_kv_per_position: key-value memory of a prompt position or frame of the talker.
    """

    weights: Mapping[str, int]
    unsplit: int
    text_table: int
    heads: int
    kv_heads: int
    kv_per_token: int
    states_per_token: int
    talker_kv_per_position: int


def weights_dtype(config: Mapping[str, Any]) -> str:
    """The dtype of a checkpoint's weights by its config.json; "bfloat16" where that says none."""
    return config.get("dtype") or config.get("torch_dtype") or "bfloat16"


def weights_by_stage(tensors: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Bytes of each stage's weights, from (name, bytes) of tensors whose names begin with a stage's."""
    weights: dict[str, int] = dict.fromkeys(STAGES, 0)
    for name, size in tensors:
        stage = name.partition(".")[0]
        if stage in weights:
            weights[stage] += size
    return weights


def kv_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """Key-value memory of a position of the transformer that `config` describes, all layers and heads."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * element_bytes
