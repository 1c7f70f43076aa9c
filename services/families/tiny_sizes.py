"""Sizes of small random checkpoints, without torch."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class TransformerShape:
    """A decoder with grouped-query attention. Fields are keys of its config, which leaves out zeros."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int = 0
    num_experts_per_tok: int = 0

    def config(self) -> dict[str, int]:
        return {key: size for key, size in asdict(self).items() if size}
