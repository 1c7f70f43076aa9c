"""How a step computes what lies between its matrix products: by torch's operators, or by kernels of ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.talker.attention import Attend
from services.talker.layers import Angles, DecoderLayer, norm
from services.talker.sampling import DrawRules, draw, uniform

RunLayers = Callable[[Sequence[DecoderLayer], torch.Tensor, Angles, Attend, torch.Tensor | None], torch.Tensor]
"""The states of a stack of layers, (tokens, hidden), normed, of: the layers; x (tokens, hidden), kept; its angles; its
attention; the norm's weight. With None instead, keys and values are stored, and the result means nothing."""


def run_layers(
    layers: Sequence[DecoderLayer], x: torch.Tensor, rope: Angles, attend: Attend, norm_weight: torch.Tensor | None
) -> torch.Tensor:
    for layer in layers:
        x = layer.forward(x, rope, attend)
    return x if norm_weight is None else norm(x, norm_weight, layers[0].spec)


@dataclass(frozen=True)
class StepKernels:
    """Functions that a step calls: RunLayers, and as those of `sampling`."""

    run_layers: RunLayers = run_layers
    draw: Callable[[torch.Tensor, DrawRules, torch.Tensor | None], torch.Tensor] = draw
    uniform: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] = uniform


TORCH = StepKernels()
