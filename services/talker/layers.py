"""Building blocks of talker and code predictor: rotary positions, a layer, a projection.

Names are those of the published weights, unless several of them are one matrix here (see `published_parameters`).
"""

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from services.common.engine.activations import activation
from services.talker.attention import Attend
from services.talker.family import MoeSpec, ProjectionSpec, TransformerSpec
from services.talker.moe import (
    Mlp,
    MlpWeights,
    MoeWeights,
    RunExperts,
    SparseMoe,
    gated_by,
    grouped_experts,
    run_mlp,
    run_moe,
)

# cos and signed sin, as Rope makes them
Angles = tuple[torch.Tensor, torch.Tensor]


class Rope(nn.Module):
    """Rotary positions (Su et al., 2021).

    With sections (t, h, w) the first t frequencies turn with time, the next h with the height, the last w with the
    width. If they are interleaved, of each three frequencies the second turns with the height and the third with the
    width, as long as their sections last; all others turn with time.
    """

    inv_freq: torch.Tensor
    axis: torch.Tensor

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        # Computed on the CPU whatever the default device is: parameters are made on the meta device.
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device="cpu") / spec.head_dim
        self.register_buffer("inv_freq", 1.0 / spec.rope_theta**exponents, persistent=False)
        self.register_buffer("axis", _axis_of_frequencies(spec), persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        """Angles, each (..., 1, head_dim), of `positions` (..., 3) of any number dtype."""
        angles = (positions.float()[..., self.axis] * self.inv_freq).unsqueeze(-2)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def _axis_of_frequencies(spec: TransformerSpec) -> torch.Tensor:
    """0, 1 or 2 for frequencies of time, height or width: (head_dim / 2,) int64 on the CPU."""
    axis = torch.zeros(spec.head_dim // 2, dtype=torch.long, device="cpu")
    if spec.rope_sections is None:
        return axis
    time, height, width = spec.rope_sections
    if spec.rope_interleaved:
        axis[1 : 3 * height : 3], axis[2 : 3 * width : 3] = 1, 2
    else:
        axis[time : time + height], axis[time + height : time + height + width] = 1, 2
    return axis


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Turns `x` (..., heads, head_dim), whose halves pair up, by the angles of `Rope`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)


class Attention(nn.Module):
    """Parameters of grouped-query attention."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        width = spec.heads * spec.head_dim
        self.spec = spec
        self.qkv_proj = nn.Linear(spec.hidden, width + 2 * spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(width, spec.hidden, bias=spec.o_bias)
        if spec.qk_norm:
            self.q_norm = nn.RMSNorm(spec.head_dim, spec.norm_eps)
            self.k_norm = nn.RMSNorm(spec.head_dim, spec.norm_eps)


class LayerWeights(NamedTuple):
    input_norm: torch.Tensor
    qkv: tuple[torch.Tensor, torch.Tensor | None]  # weight, bias
    qk_norm: torch.Tensor | None  # (heads + kv_heads, head_dim)
    o: tuple[torch.Tensor, torch.Tensor | None]
    mlp_norm: torch.Tensor
    mlp: MlpWeights | MoeWeights


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to its input.

    The modules hold parameters. The computation uses plain tensors, as a parameter costs a CPU as much to find as a
    small kernel to run.
    """

    weights: LayerWeights

    def __init__(self, spec: TransformerSpec, layer: int, moe: MoeSpec | None) -> None:
        super().__init__()
        self.spec, self.layer, self.moe = spec, layer, moe
        self.self_attn = Attention(spec)
        self.mlp = SparseMoe(spec, moe) if moe else Mlp(spec.hidden, spec.intermediate)
        self.run_experts: RunExperts = grouped_experts
        self.input_layernorm = nn.RMSNorm(spec.hidden, spec.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden, spec.norm_eps)
        self.gated = gated_by(activation(spec.activation).forward)

    def precompute(self) -> None:
        spec, attn, qk_norm = self.spec, self.self_attn, None
        if spec.qk_norm:
            norms = (attn.q_norm.weight, spec.heads), (attn.k_norm.weight, spec.kv_heads)
            qk_norm = torch.cat([weight.expand(count, -1) for weight, count in norms])
        self.weights = LayerWeights(
            self.input_layernorm.weight,
            (attn.qkv_proj.weight, attn.qkv_proj.bias),
            qk_norm,
            (attn.o_proj.weight, attn.o_proj.bias),
            self.post_attention_layernorm.weight,
            self.mlp.weights(),
        )

    def forward(self, x: torch.Tensor, rope: Angles, attend: Attend) -> torch.Tensor:
        """`x` (tokens, hidden), kept; angles (tokens or 1, 1, head_dim) each."""
        spec, w = self.spec, self.weights
        qkv = F.linear(norm(x, w.input_norm, spec), *w.qkv).view(len(x), -1, spec.head_dim)
        turning = spec.heads + spec.kv_heads  # queries and keys, in this order; values follow
        queries_keys, values = qkv[:, :turning], qkv[:, turning:]
        if w.qk_norm is not None:
            queries_keys = F.rms_norm(queries_keys, (spec.head_dim,), None, spec.norm_eps) * w.qk_norm
        turned = rotate(queries_keys, *rope)
        mixed = attend(self.layer, turned[:, : spec.heads], turned[:, spec.heads :], values)
        x = x + F.linear(mixed.reshape(len(x), -1), *w.o)
        y = norm(x, w.mlp_norm, spec)
        if isinstance(w.mlp, MlpWeights):
            return x + run_mlp(y, w.mlp, self.gated)
        assert self.moe is not None
        return x + run_moe(y, w.mlp, self.moe, self.gated, self.run_experts)


def norm(x: torch.Tensor, weight: torch.Tensor, spec: TransformerSpec) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, spec.norm_eps)


def projection(spec: ProjectionSpec | None, talker: TransformerSpec) -> nn.Module | None:
    """Takes text embeddings or thinker states, (..., inputs), into the talker's space, (..., hidden)."""
    if spec is None:
        return None
    if spec.inner is None:
        return nn.Linear(spec.inputs, talker.hidden, bias=spec.bias)
    inner = nn.Linear(spec.inputs, spec.inner, bias=spec.bias)
    outer = nn.Linear(spec.inner, talker.hidden, bias=spec.bias)
    return nn.Sequential(OrderedDict(linear_fc1=inner, activation=activation(talker.activation), linear_fc2=outer))
