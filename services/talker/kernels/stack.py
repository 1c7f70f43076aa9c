"""A stack of layers on one position of each row, with the kernels of this folder between its matrix products."""

from collections.abc import Sequence
from typing import cast

import torch
from torch.nn import functional as F

from services.talker.attention import Attend, StepAttention
from services.talker.kernels.draws import draw
from services.talker.kernels.experts import run_moe_and_norm
from services.talker.kernels.gates import silu_and_multiply
from services.talker.kernels.noise import uniform
from services.talker.kernels.norms import add_and_norm
from services.talker.kernels.rotation import rotate_and_store
from services.talker.layers import Angles, DecoderLayer, norm
from services.talker.moe import MlpWeights, run_mlp, run_moe
from services.talker.steps import StepKernels


def run_layers(
    layers: Sequence[DecoderLayer], x: torch.Tensor, rope: Angles, attend: Attend, norm_weight: torch.Tensor | None
) -> torch.Tensor:
    """As `steps.run_layers`, with a StepAttention."""
    step, spec = cast("StepAttention", attend), layers[0].spec
    normed = norm(x, layers[0].weights.input_norm, spec)
    for layer, following in zip(layers, [*(each.weights.input_norm for each in layers[1:]), norm_weight], strict=True):
        w = layer.weights
        keys, values = step.slots(layer.layer)
        query = rotate_and_store(F.linear(normed, *w.qkv), w.qk_norm, *rope, step.places, keys, values, spec.norm_eps)
        if following is None:  # keys and values are all that is wanted
            return query
        mixed = step.look(query, keys, values).reshape(len(x), -1)
        x, normed = add_and_norm(x, F.linear(mixed, *w.o), w.mlp_norm, spec.norm_eps)
        x, normed = _feed_forward(layer, x, normed, following)
    return normed


def _feed_forward(
    layer: DecoderLayer, x: torch.Tensor, y: torch.Tensor, following: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` plus the feed-forward of its norm `y`, and the following norm of that."""
    eps, w = layer.spec.norm_eps, layer.weights.mlp
    gated = silu_and_multiply if layer.spec.activation == "silu" else layer.gated
    if isinstance(w, MlpWeights):
        return add_and_norm(x, run_mlp(y, w, gated), following, eps)
    assert layer.moe is not None
    done = run_moe_and_norm(x, y, w, layer.moe, gated, layer.run_experts, following, eps)
    return done or add_and_norm(x, run_moe(y, w, layer.moe, gated, layer.run_experts), following, eps)


FUSED = StepKernels(run_layers, draw, uniform)
