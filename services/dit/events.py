"""What the engine tells of an output, in this order."""

from dataclasses import dataclass

import torch

from services.common.rpc.errors import StageError


@dataclass(frozen=True)
class Started:
    """The engine begins."""


@dataclass(frozen=True)
class Encoded:
    """The prompt, and what came with it, is read; denoising begins."""


@dataclass(frozen=True)
class Progress:
    """Denoising steps done, of all, and how many outputs shared the last of them."""

    step: int
    steps: int
    batch: int


@dataclass(frozen=True)
class Preview:
    """The picture as the model sees it after `step` steps: (height, width, 3), uint8, on the CPU."""

    step: int
    pixels: torch.Tensor


@dataclass(frozen=True)
class Done:
    """The result on the CPU, contiguous: (height, width, 3) or (frames, height, width, 3), uint8 or float32 from 0 to
    1; or (samples, channels), float32, which may go beyond -1 to 1."""

    data: torch.Tensor


@dataclass(frozen=True)
class Failed:
    """No result."""

    error: StageError


Event = Started | Encoded | Progress | Preview | Done | Failed
