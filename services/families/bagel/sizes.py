"""What a checkpoint's config files and tensors say of the model's sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.families.bagel.files import VISION, VISION_EPS, read
from services.families.bagel.mot import MotSizes
from services.families.bagel.tensor_file import TensorFile
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


def vision_of(folder: Path, stored: TensorFile) -> VisionSizes:
    """By vit_config.json and the weights. Raises ValueError: names the key or tensor that is missing."""
    vision = read(folder, VISION)
    stated = {
        name: vision[name] for name in set(VisionSizes.__dataclass_fields__) - {"num_positions", "layer_norm_eps"}
    }
    positions = stored.shape("vit_model.vision_model.embeddings.position_embedding.weight")[0]
    return VisionSizes(**stated, layer_norm_eps=vision.get("layer_norm_eps", VISION_EPS), num_positions=positions)


def sides_of(stored: TensorFile) -> tuple[int, int]:
    """(latent_side, vision_side). Raises ValueError: as `vision_of`."""
    latents, patches = (stored.shape(f"{name}_pos_embed.pos_embed")[0] for name in ("latent", "vit"))
    return round(latents**0.5), round(patches**0.5)
