"""What the stages of a checkpoint need of a GPU."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from services.registry import STAGES, has_speech

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE_LAYERS = 1  # that which a talker reads
UNSPLIT = "thinker.audio_tower."  # vLLM does not split it: its 20 heads do not go into 8 parts
ROPE_BYTES = 3 * 4  # position of a token in time, height and width, int32


@dataclass(frozen=True)
class Sizes:
    """What the stages of a checkpoint need of a GPU, as a family's `budget` reads it from config and tensors; in bytes,
    save the heads.

    Attributes:
        weights: of each stage that the checkpoint has.
        unsplit: the thinker's weights that tensor parallelism may leave whole on every GPU.
        text_table: the talker's projected embeddings of all text tokens; 0 without one.
        heads, kv_heads: number of heads of the thinker's attention.
        kv_per_token: the thinker's key-value memory of a token, all heads.
        states_per_token: what the thinker keeps beside it.
        talker_kv_per_position: the talker's key-value memory of a prompt position or frame; 0 without one.
        max_context_tokens: longest prompt plus output that the thinker is trained for; None: no bound is known.
        adapted: what a rank of one adapter takes in the thinker's layers, by vLLM's names of them: on every GPU, and
            what tensor parallelism splits.
    """

    weights: Mapping[str, int]
    unsplit: int = 0
    text_table: int = 0
    heads: int = 1
    kv_heads: int = 1
    kv_per_token: int = 0
    states_per_token: int = 0
    talker_kv_per_position: int = 0
    max_context_tokens: int | None = None
    adapted: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def of(self, stages: Collection[str]) -> "Sizes":
        """Of these stages alone."""
        return replace(self, weights={stage: size for stage, size in self.weights.items() if stage in stages})

    def with_voice(self, voice: "Sizes") -> "Sizes":
        """With the stages of another checkpoint, which speak."""
        weights, table, kv = {**self.weights, **voice.weights}, voice.text_table, voice.talker_kv_per_position
        return replace(self, weights=weights, text_table=table, talker_kv_per_position=kv)


def weights_dtype(*configs: Mapping[str, Any]) -> str:
    """The dtype of weights that the first of these parts of a config.json states; "bfloat16" if none does."""
    stated = (config.get(key) for config in configs for key in ("dtype", "torch_dtype"))
    return next((dtype for dtype in stated if dtype), "bfloat16")


def weight_bytes(tensors: Iterable[tuple[str, int]], prefix: str) -> int:
    """Bytes of the (name, bytes) whose names begin with `prefix`."""
    return sum(size for name, size in tensors if name.startswith(prefix))


def omni_sizes(config: Mapping[str, Any], tensors: Iterable[tuple[str, int]], prefixes: Mapping[str, str]) -> Sizes:
    """Sizes of an omni model's checkpoint.

    Args:
        config: its config.json.
        tensors: (name, bytes) of each.
        prefixes: of the tensors' names, by stage.

    Raises:
        KeyError: a key is missing.
    """
    tensors, thinker = list(tensors), config["thinker_config"]["text_config"]
    stated = config["talker_config"] if has_speech(config) else None
    talker: Mapping[str, Any] | None = stated and stated.get("text_config", stated)
    element = DTYPE_BYTES[weights_dtype(config)]
    stages = prefixes if talker else STAGES[:1]
    return Sizes(
        weights={stage: weight_bytes(tensors, prefixes[stage]) for stage in stages},
        unsplit=weight_bytes(tensors, UNSPLIT),
        text_table=thinker["vocab_size"] * talker["hidden_size"] * element if talker else 0,
        heads=thinker["num_attention_heads"],
        kv_heads=thinker["num_key_value_heads"],
        kv_per_token=kv_bytes(thinker, element),
        states_per_token=(STATE_LAYERS * thinker["hidden_size"] * element if talker else 0) + ROPE_BYTES,
        talker_kv_per_position=kv_bytes(talker, element) if talker else 0,
        max_context_tokens=thinker.get("max_position_embeddings", 32_768),
        adapted=adapted_bytes(thinker, element),
    )


def kv_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """Key-value memory of a position of the transformer `config`, all layers and heads."""
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * _head_dim(config) * element_bytes


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def adapted_bytes(config: Mapping[str, Any], element_bytes: int) -> dict[str, tuple[int, int]]:
    """`Sizes.adapted` of the transformer `config`: the inputs and outputs of its layers, all blocks and experts. vLLM
    keeps them whole on every GPU where tensor parallelism does not split the layer in that direction."""
    hidden, head = config["hidden_size"], _head_dim(config)
    experts = config.get("num_experts") or config.get("num_local_experts")  # of transformers 4 and 5
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    elements = {"qkv_proj": (3 * hidden, queries + 2 * keys), "o_proj": (hidden, queries)}
    if experts:  # one matrix A for gate and up
        inner = config["moe_intermediate_size"]
        elements |= {"gate": (hidden + experts, 0), "experts": (experts * 2 * hidden, experts * 3 * inner)}
    else:
        inner = config["intermediate_size"]
        elements |= {"gate_up_proj": (2 * hidden, 2 * inner), "down_proj": (hidden, inner)}
    scale = config["num_hidden_layers"] * element_bytes
    return {name: (whole * scale, split * scale) for name, (whole, split) in elements.items()}


def adapter_bytes(sizes: Sizes, layers: Collection[str], max_loras: int, max_rank: int, gpus: int = 1) -> int:
    """What vLLM takes on each of the thinker's `gpus` for adapters of these layers, whatever their own rank is."""
    taken = (whole + split // gpus for name, (whole, split) in sizes.adapted.items() if name in layers)
    return max_loras * max_rank * sum(taken)
