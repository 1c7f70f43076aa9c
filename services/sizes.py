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
        sound_step_per_s: what a step of an aligner takes for each second of its sounds; 0 without one.
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
    sound_step_per_s: int = 0
    max_context_tokens: int | None = None
    adapted: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def of(self, stages: Collection[str]) -> "Sizes":
        """Of these stages alone."""
        return replace(self, weights={stage: size for stage, size in self.weights.items() if stage in stages})

    def with_voice(self, voice: "Sizes") -> "Sizes":
        """With the stages of another checkpoint, which speak."""
        weights, table, kv = {**self.weights, **voice.weights}, voice.text_table, voice.talker_kv_per_position
        return replace(self, weights=weights, text_table=table, talker_kv_per_position=kv)


@dataclass(frozen=True)
class ContextSizes:
    """Keys and values of what a request says, where each denoising step looks at them; in bytes, save the counts.

    Attributes:
        per_token: of a token, all layers and heads.
        tokens: of the longest context that is counted for an output; `what` says which that is.
        branches: of guidance, each with a context of an output.
        of_layer: of a token in one layer, with the heads of keys repeated for those of queries, as attention under a
            mask takes them.
        denoised_tokens: of an output's own latents.
    """

    per_token: int
    tokens: int
    branches: int
    of_layer: int
    denoised_tokens: int
    what: str

    @property
    def of_output(self) -> int:
        """Of an output while it is denoised: the contexts of its branches, padded to one length, and that which was
        read."""
        return (self.branches + 1) * self.tokens * self.per_token

    def of_step(self, outputs: int) -> int:
        """Of a step of so many outputs: their contexts joined into one tensor, and one layer's keys and values."""
        rows = outputs * self.branches
        joined = rows * self.tokens * self.per_token if outputs > 1 else 0
        return joined + rows * (self.tokens + self.denoised_tokens) * self.of_layer


@dataclass(frozen=True)
class PipelineSizes:
    """What a diffusion model's processes need of a GPU, in bytes.

    Attributes:
        weights: of each part of the pipeline.
        of_encoder: parts that an encoder's process loads.
        beside_encoder: parts that a dit loads whose prompts an encoder's process encodes.
        context: None: what a request says is no longer than a prompt's states.
    """

    weights: Mapping[str, int]
    of_encoder: Collection[str]
    beside_encoder: Collection[str]
    context: ContextSizes | None = None


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


def layer_kv_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """Key-value memory of a position in one layer of the transformer `config`, with keys for each head of queries."""
    return 2 * config["num_attention_heads"] * _head_dim(config) * element_bytes


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
