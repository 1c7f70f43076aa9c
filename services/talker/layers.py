"""The building blocks of talker and code predictor. Names are those of the published weights, except where several of
them are one matrix here: `loading.py` knows which."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from services.talker.attend import Attend
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
from services.talker.spec import MoeSpec, TransformerSpec

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
    """Rotary positions (Su et al., 2021), interleaved over time, height and width where there are sections.

    With sections (t, h, w), of each three consecutive frequencies the second turns with the height and the third with
    the width, as long as their sections last; all others turn with time. Equal to the reference's
    `Qwen3OmniMoeTalkerRotaryEmbedding`.
    """

    inv_freq: torch.Tensor
    axis: torch.Tensor

    def __init__(self, spec: TransformerSpec, mrope_section: tuple[int, ...] | None = None) -> None:
        super().__init__()
        half = spec.head_dim // 2
        # Computed on the CPU whatever the default device is: parameters are made on the meta device.
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device="cpu") / spec.head_dim
        self.register_buffer("inv_freq", 1.0 / spec.rope_theta**exponents, persistent=False)
        axis = torch.zeros(half, dtype=torch.long, device="cpu")
        if mrope_section:
            for dim in (1, 2):
                axis[dim : mrope_section[dim] * 3 : 3] = dim
        self.register_buffer("axis", axis, persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        """Angles for `rotate`, each (..., 1, head_dim), for `positions` (..., 3) of any number dtype."""
        angles = (positions.float()[..., self.axis] * self.inv_freq).unsqueeze(-2)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Turns `x` (..., heads, head_dim), whose halves pair up, by the angles of `Rope`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)


class Attention(nn.Module):
    """Parameters of grouped-query attention with normed queries and keys."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        width, bias = spec.heads * spec.head_dim, spec.attention_bias
        self.spec = spec
        self.qkv_proj = nn.Linear(spec.hidden, width + 2 * spec.kv_heads * spec.head_dim, bias=bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps)
        self.o_proj = nn.Linear(width, spec.hidden, bias=bias)


class _LayerWeights(NamedTuple):
    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor  # (heads + kv_heads, head_dim)
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
        norms = (attn.q_norm.weight, self.spec.heads), (attn.k_norm.weight, self.spec.kv_heads)
        self._weights = _LayerWeights(
            self.input_layernorm.weight,
            attn.qkv_proj.weight,
            attn.qkv_proj.bias,
            torch.cat([weight.expand(count, -1) for weight, count in norms]),
            attn.o_proj.weight,
            attn.o_proj.bias,
            self.post_attention_layernorm.weight,
            feed_forward,
        )

    def forward(self, x: torch.Tensor, rope: Angles, attend: Attend) -> torch.Tensor:
        """`x` (tokens, hidden), kept; `rope` (tokens or 1, 1, head_dim) each."""
        spec, w = self.spec, self._weights
        qkv = F.linear(_norm(x, w.input_norm, spec), w.qkv, w.qkv_bias).view(len(x), -1, spec.head_dim)
        normed = spec.heads + spec.kv_heads  # queries and keys, in this order; values follow
        turned = rotate(F.rms_norm(qkv[:, :normed], (spec.head_dim,), None, spec.norm_eps) * w.qk_norm, *rope)
        mixed = attend(self.layer, turned[:, : spec.heads], turned[:, spec.heads :], qkv[:, normed:])
        x = x + F.linear(mixed.reshape(len(x), -1), w.o, w.o_bias)
        y = _norm(x, w.mlp_norm, spec)
        if isinstance(w.mlp, MlpWeights):
            return x + run_mlp(y, w.mlp, self.activation)
        assert self.moe is not None
        return x + run_moe(y, w.mlp, self.moe, self.activation, self.run_experts)


def _norm(x: torch.Tensor, weight: torch.Tensor, spec: TransformerSpec) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, spec.norm_eps)


class ResizeMlp(nn.Module):
    """Projects a thinker state into the talker's space."""

    def __init__(self, thinker_hidden: int, spec: TransformerSpec) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(thinker_hidden, spec.intermediate)
        self.linear_fc2 = nn.Linear(spec.intermediate, spec.hidden)
        self.activation = ACT2FN[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x)))
