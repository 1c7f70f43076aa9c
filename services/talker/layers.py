"""The building blocks of talker and code predictor. Names are those of the published weights, except where several of
them are one matrix here: `loading.py` knows which."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from services.talker.attend import Attend
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
    """Grouped-query attention with normed queries and keys."""

    _qk_norm: torch.Tensor

    def __init__(self, spec: TransformerSpec, layer: int) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        self.normed = spec.heads + spec.kv_heads  # queries and keys, in this order; values follow
        self.qkv_proj = nn.Linear(
            spec.hidden, (self.normed + spec.kv_heads) * spec.head_dim, bias=spec.attention_bias
        )
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps)
        self.register_buffer("_qk_norm", torch.empty(0), persistent=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.attention_bias)

    def precompute(self) -> None:
        """To be called once the parameters are loaded: queries and keys are normed in one go."""
        weights = [self.q_norm.weight] * self.spec.heads + [self.k_norm.weight] * self.spec.kv_heads
        self._qk_norm = torch.stack(weights)  # (heads + kv_heads, head_dim)

    def forward(self, x: torch.Tensor, rope: Angles, attend: Attend) -> torch.Tensor:
        """`x` (..., hidden), kept; `rope` (..., 1, head_dim) each."""
        spec = self.spec
        qkv = self.qkv_proj(x).unflatten(-1, (-1, spec.head_dim))
        normed = F.rms_norm(qkv[..., : self.normed, :], (spec.head_dim,), eps=spec.norm_eps) * self._qk_norm
        turned = rotate(normed, *rope)
        mixed = attend(
            self.layer, turned[..., : spec.heads, :], turned[..., spec.heads :, :], qkv[..., self.normed :, :]
        )
        return self.o_proj(mixed.flatten(-2))


class Mlp(nn.Module):
    """Gated feed-forward; gate and up projection are one matrix."""

    def __init__(self, hidden: int, intermediate: int, activation: str) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.activation = ACT2FN[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation(gate) * up)


class Experts(nn.Module):
    """The experts' weights, stacked, with gate and up projections side by side."""

    def __init__(self, spec: TransformerSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(moe.experts, 2 * moe.intermediate, spec.hidden))
        self.down_proj = nn.Parameter(torch.empty(moe.experts, spec.hidden, moe.intermediate))


class SparseMoe(nn.Module):
    """Routed experts plus a gated shared expert. No step of it waits for the device.

    The experts run as two grouped matrix products over the tokens sorted by expert, so that the number of tokens an
    expert gets never reaches the host.
    """

    def __init__(self, spec: TransformerSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.moe = moe
        self.gate = nn.Linear(spec.hidden, moe.experts, bias=False)
        self.experts = Experts(spec, moe)
        self.shared_expert = Mlp(spec.hidden, moe.shared_intermediate, spec.activation)
        self.shared_expert_gate = nn.Linear(spec.hidden, 1, bias=False)
        self.activation = ACT2FN[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        probabilities = torch.softmax(self.gate(tokens), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.moe.experts_per_token, dim=-1)
        if self.moe.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        routed = self._run_experts(tokens, chosen, weights.to(tokens.dtype))
        shared = torch.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        return (routed + shared).view_as(x)

    def _run_experts(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        by_expert, order = chosen.flatten().sort(stable=True)
        experts = torch.arange(self.moe.experts, device=tokens.device)
        ends = torch.searchsorted(by_expert, experts, right=True).to(torch.int32)
        inputs = tokens[order // self.moe.experts_per_token]
        gate, up = F.grouped_mm(inputs, self.experts.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        outputs = F.grouped_mm(self.activation(gate) * up, self.experts.down_proj.transpose(1, 2), offs=ends)
        unsorted = torch.empty_like(outputs).index_copy_(0, order, outputs)
        return (unsorted.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to its input."""

    def __init__(self, spec: TransformerSpec, layer: int, moe: MoeSpec | None) -> None:
        super().__init__()
        self.self_attn = Attention(spec, layer)
        self.mlp = SparseMoe(spec, moe) if moe else Mlp(spec.hidden, spec.intermediate, spec.activation)
        self.input_layernorm = RMSNorm(spec.hidden, spec.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.norm_eps)

    def forward(self, x: torch.Tensor, rope: Angles, attend: Attend) -> torch.Tensor:
        """As `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class ResizeMlp(nn.Module):
    """Projects a thinker state into the talker's space."""

    def __init__(self, thinker_hidden: int, spec: TransformerSpec) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(thinker_hidden, spec.intermediate)
        self.linear_fc2 = nn.Linear(spec.intermediate, spec.hidden)
        self.activation = ACT2FN[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x)))
