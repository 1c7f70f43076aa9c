"""Sizes of the transformer."""

from dataclasses import dataclass
from typing import Any

# Defaults of a checkpoint's config, with the speaker encoder's.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 22,
    "num_attention_heads": 16,
    "ff_mult": 2,
    "emb_dim": 512,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "block_size": 24,
    "look_ahead_layers": [10],
    "look_backward_layers": [0, 20],
    "repeats": 2,
    "num_embeds": 8193,
    "mel_dim": 80,
    "enc_emb_dim": 192,
    "enc_dim": 128,
    "enc_channels": [256, 256, 256, 256, 768],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 64,
    "enc_res2net_scale": 2,
    "enc_se_channels": 64,
}


@dataclass(frozen=True)
class DitSizes:
    """Sizes of the transformer.

    Attributes:
        repeats: mel frames of a code.
        block: mel frames of a block.
        codes: number of codes.
        ahead, back: layers that also attend to the next or previous block.
        voice: width of a voice's conditioning.
        speaker: width of the speaker encoder's vector.
        most_mel_frames: of a window.
    """

    hidden: int
    layers: int
    heads: int
    head_dim: int
    feed_forward: int
    rope_theta: float
    mel_bins: int
    repeats: int
    block: int
    codes: int
    code_width: int
    ahead: frozenset[int]
    back: frozenset[int]
    voice: int
    speaker: int
    most_mel_frames: int

    @property
    def block_codes(self) -> int:
        return self.block // self.repeats

    @classmethod
    def of(cls, config: dict[str, Any], name: str) -> "DitSizes":
        """Reads the sizes from `config`, which has all keys of `DEFAULTS`. Errors call it `name`.

        Raises:
            ValueError: sizes do not fit.
        """
        rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"{name}: rope_type {rope['rope_type']} is not supported, only default")
        sizes = cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            head_dim=config["head_dim"],
            feed_forward=int(config["hidden_size"] * config["ff_mult"]),
            rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
            mel_bins=config["mel_dim"],
            repeats=config["repeats"],
            block=config["block_size"],
            codes=config["num_embeds"] + 1,
            code_width=config["emb_dim"],
            ahead=frozenset(config["look_ahead_layers"]),
            back=frozenset(config["look_backward_layers"]),
            voice=config["enc_emb_dim"],
            speaker=config["enc_dim"],
            most_mel_frames=config["max_position_embeddings"],
        )
        if sizes.block % sizes.repeats:
            raise ValueError(f"{name}.block_size {sizes.block} must be a multiple of repeats, {sizes.repeats}")
        return sizes
