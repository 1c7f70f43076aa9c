"""Pictures as the model reads them: their sizes, and their pixels."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_SHORTEST_LATENTS = (1, 2)  # of the longest side: 512 of 1,024 pixels in the published program
_SHORTEST_PATCHES = (16, 70)  # 224 of 980 pixels


def for_latents(picture: Image.Image, side: int, stride: int) -> Image.Image:
    """The picture as the VAE reads it, RGB.

    Args:
        side: most tokens of latents along a side.
        stride: pixels a token, along a side.
    """
    return _scaled(picture.convert("RGB"), side, stride, _SHORTEST_LATENTS)


def for_patches(picture: Image.Image, side: int, stride: int) -> Image.Image:
    """The picture, RGB, as the vision encoder reads it; `side` and `stride` of patches."""
    return _scaled(picture, side, stride, _SHORTEST_PATCHES)


def scaled_size(size: tuple[int, int], side: int, stride: int, shortest: tuple[int, int]) -> tuple[int, int]:
    """(width, height): multiples of `stride`, none over `side` times that; the longer side decides.

    The rule is the published program's: a picture is made smaller until no side is over the longest, and larger until
    no side is under the shortest, a fraction (over, under) of the longest.
    """

    def times(size: tuple[int, int], scale: float) -> tuple[int, int]:
        width, height = (max(stride, round(round(each * scale) / stride) * stride) for each in size)
        return width, height

    longest = side * stride
    scale = max(min(longest / max(size), 1.0), longest * shortest[0] // shortest[1] / min(size))
    made = times(size, scale)
    return times(made, longest / max(made)) if max(made) > longest else made


def _scaled(picture: Image.Image, side: int, stride: int, shortest: tuple[int, int]) -> Image.Image:
    return picture.resize(scaled_size(picture.size, side, stride, shortest), Image.Resampling.BICUBIC)


def pixels_of(picture: Image.Image, device: torch.device) -> Tensor:
    """(3, height, width), float32, -1 to 1."""
    pixels = torch.as_tensor(np.array(picture), device=device)
    return pixels.permute(2, 0, 1).float() / 255 * 2 - 1
