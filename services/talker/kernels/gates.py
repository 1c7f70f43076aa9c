"""SiLU of gates, times ups."""

import torch
import triton
import triton.language as tl

_BLOCK = tl.constexpr(1024)


@torch.library.custom_op("quartet::silu_and_multiply", mutates_args=())
def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Gates and ups (..., 2 n), contiguous, to (..., n)."""
    inner = _inner_like(gate_up)
    size = inner.shape[-1]
    _silu_and_multiply[(inner.numel() // size, triton.cdiv(size, _BLOCK.value))](gate_up, inner, size)
    return inner


@silu_and_multiply.register_fake
def _(gate_up):
    return _inner_like(gate_up)


def _inner_like(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@triton.jit
def _silu_and_multiply(gate_up, inner, size):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = column < size
    gate = tl.load(gate_up + 2 * row * size + column, mask=inside, other=0.0)
    up = tl.load(gate_up + (2 * row + 1) * size + column, mask=inside, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    activated = (x / (1.0 + tl.exp(-x))).to(gate.dtype).to(tl.float32)
    tl.store(inner + row * size + column, (activated * up).to(gate.dtype), mask=inside)
