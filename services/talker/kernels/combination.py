"""The sum of a token's experts, of the shared one and of the residual, and its norm."""

from typing import Any

import torch
import triton
import triton.language as tl


@torch.library.custom_op("quartet::combine_and_norm", mutates_args=())
def combine_and_norm(
    x: torch.Tensor,
    outputs: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor,
    shared_gate: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` plus its experts, and the norm of that: (tokens, hidden) each.

    Args:
        x: (tokens, hidden), as is `shared`, which counts by the sigmoid of `shared_gate` (tokens, 1).
        outputs: (tokens * wanted, hidden) in the order of Routes, whose places and weights are (tokens, wanted).
    """
    total, normed = torch.empty_like(x), torch.empty_like(x)
    rows, size = x.shape
    constants: Any = weights.shape[1], size, triton.next_power_of_2(size)
    _combine_and_norm[(rows,)](x, outputs, places, weights, shared, shared_gate, norm, total, normed, eps, *constants)
    return total, normed


@combine_and_norm.register_fake
def _(x, outputs, places, weights, shared, shared_gate, norm, eps):
    return torch.empty_like(x), torch.empty_like(x)


@triton.jit
def _combine_and_norm(
    x,
    outputs,
    places,
    weights,
    shared,
    shared_gate,
    norm,
    total,
    normed,
    eps,
    WANTED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < SIZE
    dtype = x.dtype.element_ty
    routed = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WANTED):
        pair = row * WANTED + rank
        output = tl.load(outputs + tl.load(places + pair) * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        routed += (output * tl.load(weights + pair).to(tl.float32)).to(dtype).to(tl.float32)
    routed = routed.to(dtype).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-tl.load(shared_gate + row).to(tl.float32)))).to(dtype).to(tl.float32)
    always = tl.load(shared + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    mixed = (routed + gate * always).to(dtype).to(tl.float32)
    added = (tl.load(x + row * SIZE + column, mask=inside, other=0.0).to(tl.float32) + mixed).to(dtype)
    tl.store(total + row * SIZE + column, added, mask=inside)
    added = added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(added * added, 0) / SIZE + eps)
    scaled = added * scale * tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * SIZE + column, scaled.to(dtype), mask=inside)
