"""What a checkpoint's config files and tensors say of the model's sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.families.bagel.mot import MotSizes
from services.families.bagel.vision import VisionSizes

PIXELS_A_LATENT = 8


@dataclass(frozen=True)
class BagelSizes:
    """Of a checkpoint.

    Attributes:
        marks: ids of the tokens before and after a picture.
        latent_channels: of the VAE.
        latent_side, vision_side: most tokens of latents, and most patches, along a picture's side.
        max_positions: of rope.
    """

    mot: MotSizes
    vision: VisionSizes
    marks: tuple[int, int]
    latent_channels: int
    latent_side: int
    vision_side: int
    max_positions: int

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> "BagelSizes":
        """The inverse of `dataclasses.asdict`."""
        first, last = stated["marks"]
        others = {name: value for name, value in stated.items() if name not in ("mot", "vision", "marks")}
        return cls(MotSizes(**stated["mot"]), VisionSizes(**stated["vision"]), (first, last), **others)
