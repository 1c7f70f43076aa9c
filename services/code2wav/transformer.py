"""A codec's transformer, with a sliding window of attention that keeps its keys and values.

Tensors are (streams, frames, hidden).
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from services.code2wav.causal import Carry, StateLayout
from services.common.engine.activations import activation


@dataclass(frozen=True)
class TransformerSizes:
    """Sizes in channels, by their names in config.json. `sliding_window` is the positions that a frame attends to,
    itself included."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    attention_bias: bool
    hidden_act: str
    rms_norm_eps: float
    rope_theta: float
    sliding_window: int


class RMSNorm(nn.RMSNorm):
    """torch's, computed in float32 for any dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden), kept."""
        return self.weight * F.rms_norm(x.float(), self.normalized_shape, eps=self.eps).to(x.dtype)


class LayerScale(nn.Module):
    """Learned factor per channel of a residual branch. arXiv:2103.17239."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden), kept."""
        return self.scale * x


class StepContext:
    """Rotary angles and mask of one step for all layers; `x` (streams, frames, hidden) gives shape, dtype and device.
    See `CausalDecoder.forward`."""

    def __init__(
        self, x: torch.Tensor, positions: torch.Tensor, sizes: TransformerSizes, carry: Carry, settled: bool
    ) -> None:
        self.carry = carry
        frames, past, dtype, device = x.shape[1], sizes.sliding_window - 1, x.dtype, x.device
        # Key j of a stream at frame t has position t - past + j. Below 0 there is none.
        keys = torch.arange(past + frames, device=device)
        distance = torch.arange(past, past + frames, device=device)[:, None] - keys
        seen = ((distance >= 0) & (distance < sizes.sliding_window))[None, None]
        if not settled:
            seen = seen & (keys >= past - positions[:, None])[:, None, None]
        hidden = torch.full((), -torch.inf, dtype=dtype, device=device)
        self.mask = torch.where(seen, 0.0, hidden)  # (streams or 1, 1, frames, past + frames)
        # The reference's operations in its order: at large positions rounding changes the angle.
        exponents = torch.arange(0, sizes.head_dim, 2, device=device, dtype=torch.float) / sizes.head_dim
        queries = positions[:, None, None, None] + torch.arange(frames, device=device)[:, None]
        angles = queries.float() * (1.0 / sizes.rope_theta**exponents)
        angles = torch.cat([angles, angles], dim=-1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)  # (streams, 1, frames, head_dim)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Applies rotary positions to (streams, heads, frames, head_dim). arXiv:2104.09864."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin


class SlidingWindowAttention(nn.Module):
    """Attention of each frame to the `window` frames that end with it."""

    def __init__(self, sizes: TransformerSizes, layout: StateLayout) -> None:
        super().__init__()
        self._heads, self._kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
        self._head_dim = sizes.head_dim
        queries, keys, bias = self._heads * self._head_dim, self._kv_heads * self._head_dim, sizes.attention_bias
        self.q_proj = nn.Linear(sizes.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(sizes.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(sizes.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, sizes.hidden_size, bias=bias)
        self._past = sizes.sliding_window - 1
        self._piece = layout.add((2 * self._kv_heads, self._past, self._head_dim))

    def precompute(self) -> None:
        """Joins three products into one."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        self._weight = torch.cat([projection.weight for projection in projections])
        self._bias = None if self.q_proj.bias is None else torch.cat([projection.bias for projection in projections])

    def forward(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """(streams, frames, hidden), kept."""
        heads, kv_heads = self._heads, self._kv_heads
        new = F.linear(x, self._weight, self._bias).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
        rotated = step.rotate(new[:, : heads + kv_heads])
        before = step.carry.take(self._piece)
        keys = torch.cat([before[:, :kv_heads], rotated[:, heads:]], dim=2)
        values = torch.cat([before[:, kv_heads:], new[:, heads + kv_heads :]], dim=2)
        kept = keys.shape[2] - self._past
        step.carry.keep(self._piece, torch.cat([keys[:, :, kept:], values[:, :, kept:]], dim=1))
        y = F.scaled_dot_product_attention(
            rotated[:, :heads], keys, values, attn_mask=step.mask, enable_gqa=heads != kv_heads
        )
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class GatedMlp(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)
        self._activation = activation(sizes.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden), kept."""
        return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))


class TransformerLayer(nn.Module):
    def __init__(self, sizes: TransformerSizes, layout: StateLayout) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = SlidingWindowAttention(sizes, layout)
        self.self_attn_layer_scale = LayerScale(sizes.hidden_size)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = GatedMlp(sizes)
        self.mlp_layer_scale = LayerScale(sizes.hidden_size)

    def forward(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """(streams, frames, hidden), kept."""
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), step))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class CodecTransformer(nn.Module):
    """All layers and the final norm. It projects from and to the width `projected_from`, unless that is 0."""

    def __init__(self, sizes: TransformerSizes, layout: StateLayout, projected_from: int = 0) -> None:
        super().__init__()
        self.input_proj = nn.Linear(projected_from, sizes.hidden_size) if projected_from else nn.Identity()
        self.output_proj = nn.Linear(sizes.hidden_size, projected_from) if projected_from else nn.Identity()
        self.layers = nn.ModuleList(TransformerLayer(sizes, layout) for _ in range(sizes.num_hidden_layers))
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self._sizes = sizes

    def forward(self, x: torch.Tensor, positions: torch.Tensor, carry: Carry, settled: bool) -> torch.Tensor:
        """(streams, frames, hidden or `projected_from`), kept. See `StepContext`."""
        x = self.input_proj(x)
        step = StepContext(x, positions, self._sizes, carry, settled)
        for layer in self.layers:
            x = layer(x, step)
        return self.output_proj(self.norm(x))
