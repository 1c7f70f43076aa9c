"""Sizes of the transformer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

# Defaults of the speaker encoder's part of the config.
SPEAKER_DEFAULTS: dict[str, Any] = {
    "mel_dim": 80,
    "enc_dim": 128,
    "enc_channels": [256, 256, 256, 256, 768],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 64,
    "enc_res2net_scale": 2,
    "enc_se_channels": 64,
}


def fields_in(config: Mapping[str, Any], sizes: type) -> dict[str, Any]:
    """The members of `config` that are fields of the dataclass `sizes`."""
    names = {field.name for field in fields(sizes)}
    return {key: value for key, value in config.items() if key in names}


@dataclass(frozen=True)
class DitSizes:
    """Sizes of the transformer: keys of its config, with their defaults.

    Attributes:
        emb_dim: width of a code.
        max_position_embeddings: most mel frames of a window.
        block_size: mel frames of a block.
        look_ahead_layers, look_backward_layers: layers that also attend to the next or previous block.
        repeats: mel frames of a code.
        enc_emb_dim: width of a voice's conditioning.
        enc_dim: width of the speaker encoder's vector.
    """

    hidden_size: int = 1024
    num_hidden_layers: int = 22
    num_attention_heads: int = 16
    head_dim: int = 64
    ff_mult: float = 2
    rope_theta: float = 10_000.0
    emb_dim: int = 512
    max_position_embeddings: int = 32768
    block_size: int = 24
    look_ahead_layers: Sequence[int] = (10,)
    look_backward_layers: Sequence[int] = (0, 20)
    repeats: int = 2
    num_embeds: int = 8193
    mel_dim: int = 80
    enc_emb_dim: int = 192
    enc_dim: int = 128

    @property
    def codes(self) -> int:
        """Number of codes."""
        return self.num_embeds + 1

    @property
    def block_codes(self) -> int:
        return self.block_size // self.repeats

    @classmethod
    def of(cls, config: dict[str, Any], name: str) -> "DitSizes":
        """Reads the sizes from `config`. Errors call it `name`.

        Raises:
            ValueError: sizes do not fit.
        """
        rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"{name}: rope_type {rope['rope_type']} is not supported, only default")
        stated = fields_in(config, cls)
        stated["rope_theta"] = rope.get("rope_theta") or config.get("rope_theta") or cls.rope_theta
        sizes = cls(**stated)
        if sizes.block_size % sizes.repeats:
            raise ValueError(f"{name}.block_size {sizes.block_size} must be a multiple of repeats, {sizes.repeats}")
        return sizes
