"""The building blocks of talker and code predictor. Names are those of the published weights, except where several of
them are one matrix here: `loading.py` knows which."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from services.talker.attention import Attend
from services.talker.family import MoeSpec, ProjectionSpec, TransformerSpec
from services.talker.moe import (
    Mlp,
    MlpWeights,
    MoeWeights,
    RunExperts,
    SparseMoe,
    grouped_experts,
    run_mlp,
    run_moe,
    weights_of,
)

# cos and signed sin, as Rope makes them
Angles = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm computed in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rope(nn.Module):
    """Rotary positions (Su et al., 2021), of time, height and width where there are sections.

    With sections (t, h, w) the first t frequencies turn with time, the next h with the height, the last w with the
    width. If they are interleaved, of each three consecutive frequencies the second turns with the height and the third
    with the width, as long as their sections last; all others turn with time.
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
        """Angles for `rotate`, each (..., 1, head_dim), for `positions` (..., 3) of any number dtype."""
        angles = (positions.float()[..., self.axis] * self.inv_freq).unsqueeze(-2)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def _axis_of_frequencies(spec: TransformerSpec) -> torch.Tensor:
    """Which of time, height and width each frequency turns with: (head_dim / 2,) int64 on the CPU."""
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
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps)

    def qk_norm_weight(self) -> torch.Tensor | None:
        """(heads + kv_heads, head_dim), or None where neither is normed."""
        if not self.spec.qk_norm:
            return None
        norms = (self.q_norm.weight, self.spec.heads), (self.k_norm.weight, self.spec.kv_heads)
        return torch.cat([weight.expand(count, -1) for weight, count in norms])


class _LayerWeights(NamedTuple):
    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # (heads + kv_heads, head_dim)
    o: torch.Tensor
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: MlpWeights | MoeWeights


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to its input.

    The modules within hold parameters; what is computed is below, over plain tensors: finding a parameter in a module
    costs a CPU as much as a small kernel, and a frame has a thousand of those.
    """

    _weights: _LayerWeights

    def __init__(self, spec: TransformerSpec, layer: int, moe: MoeSpec | None) -> None:
        super().__init__()
        self.spec, self.layer, self.moe = spec, layer, moe
        self.self_attn = Attention(spec)
        self.mlp = SparseMoe(spec, moe) if moe else Mlp(spec.hidden, spec.intermediate)
        self.run_experts: RunExperts = grouped_experts
        self.input_layernorm = RMSNorm(spec.hidden, spec.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.norm_eps)
        self.activation = ACT2FN[spec.activation].forward

    def precompute(self) -> None:
        """To be called once the parameters are loaded."""
        attn, mlp = self.self_attn, self.mlp
        if isinstance(mlp, SparseMoe):
            feed_forward = weights_of(mlp)
        else:
            feed_forward = MlpWeights(mlp.gate_up_proj.weight, mlp.down_proj.weight)
        self._weights = _LayerWeights(
            self.input_layernorm.weight,
            attn.qkv_proj.weight,
            attn.qkv_proj.bias,
            attn.qk_norm_weight(),
            attn.o_proj.weight,
            attn.o_proj.bias,
            self.post_attention_layernorm.weight,
            feed_forward,
        )

    def forward(self, x: torch.Tensor, rope: Angles, attend: Attend) -> torch.Tensor:
        """`x` (tokens, hidden), kept; `rope` (tokens or 1, 1, head_dim) each."""
        spec, w = self.spec, self._weights
        qkv = F.linear(_norm(x, w.input_norm, spec), w.qkv, w.qkv_bias).view(len(x), -1, spec.head_dim)
        turning = spec.heads + spec.kv_heads  # queries and keys, in this order; values follow
        queries_keys, values = qkv[:, :turning], qkv[:, turning:]
        if w.qk_norm is not None:
            queries_keys = F.rms_norm(queries_keys, (spec.head_dim,), None, spec.norm_eps) * w.qk_norm
        turned = rotate(queries_keys, *rope)
        mixed = attend(self.layer, turned[:, : spec.heads], turned[:, spec.heads :], values)
        x = x + F.linear(mixed.reshape(len(x), -1), w.o, w.o_bias)
        y = _norm(x, w.mlp_norm, spec)
        if isinstance(w.mlp, MlpWeights):
            return x + run_mlp(y, w.mlp, self.activation)
        assert self.moe is not None
        return x + run_moe(y, w.mlp, self.moe, self.activation, self.run_experts)


def _norm(x: torch.Tensor, weight: torch.Tensor, spec: TransformerSpec) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, spec.norm_eps)


class Projection(nn.Module):
    """Takes text embeddings or thinker states into the talker's space, with an inner layer."""

    def __init__(self, spec: ProjectionSpec, inner: int, talker: TransformerSpec) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(spec.inputs, inner, bias=spec.bias)
        self.linear_fc2 = nn.Linear(inner, talker.hidden, bias=spec.bias)
        self.activation = ACT2FN[talker.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x)))


def projection(spec: ProjectionSpec | None, talker: TransformerSpec) -> nn.Module | None:
    """What `spec` says, (..., inputs) to (..., hidden)."""
    if spec is None:
        return None
    if spec.inner is None:
        return nn.Linear(spec.inputs, talker.hidden, bias=spec.bias)
    return Projection(spec, spec.inner, talker)
