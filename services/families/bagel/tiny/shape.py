"""Dimensions of a small checkpoint, without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BagelShape:
    """A checkpoint's dimensions. `vae`: widths of its levels. `vae_blocks`: of a level of its encoder."""

    merges: int  # of the byte-level BPE
    llm: Mapping[str, int]
    vision: Mapping[str, int]
    vision_side: int
    latent_side: int
    latent_channels: int
    vae: Sequence[int]
    vae_blocks: int
