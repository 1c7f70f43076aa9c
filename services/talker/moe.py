"""Routed experts and a gated shared expert, by one of two paths without branches on data."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from services.talker.family import MoeSpec, TransformerSpec

# Reading the gathered weights of an expert costs about three times what reading them in place does: they are read,
# written, and read again.
_GATHER_COST = 3


class MlpWeights(NamedTuple):
    """A gated feed-forward: (2 intermediate, hidden) and (hidden, intermediate)."""

    gate_up: torch.Tensor
    down: torch.Tensor


class MoeWeights(NamedTuple):
    """What a layer's experts compute with.

    Attributes:
        gate: (experts, hidden).
        gate_up: (experts, hidden, 2 intermediate), a view of the transposed weights, as is
        down: (experts, intermediate, hidden).
        shared_gate: (1, hidden).
        experts: (experts,) int64, their numbers.
    """

    gate: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: MlpWeights
    shared_gate: torch.Tensor
    experts: torch.Tensor


class Mlp(nn.Module):
    """Parameters of a gated feed-forward."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def weights(self) -> MlpWeights:
        """For `run_mlp`, once they are loaded."""
        return MlpWeights(self.gate_up_proj.weight, self.down_proj.weight)


class Experts(nn.Module):
    def __init__(self, spec: TransformerSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(moe.experts, 2 * moe.intermediate, spec.hidden))
        self.down_proj = nn.Parameter(torch.empty(moe.experts, spec.hidden, moe.intermediate))


class SparseMoe(nn.Module):
    def __init__(self, spec: TransformerSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden, moe.experts, bias=False)
        self.experts = Experts(spec, moe)
        self.shared_expert = Mlp(spec.hidden, moe.shared_intermediate)
        self.shared_expert_gate = nn.Linear(spec.hidden, 1, bias=False)

    def weights(self) -> MoeWeights:
        """For `run_moe`, once they are loaded."""
        gate_up, down = self.experts.gate_up_proj.transpose(1, 2), self.experts.down_proj.transpose(1, 2)
        experts = torch.arange(len(down), device=down.device)
        shared, shared_gate = self.shared_expert.weights(), self.shared_expert_gate.weight
        return MoeWeights(self.gate.weight, gate_up, down, shared, shared_gate, experts)


Gated = Callable[[torch.Tensor], torch.Tensor]
"""Gates and ups (..., 2 n) to inner values (..., n)."""

RunExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, MoeWeights, Gated], torch.Tensor]
"""The weighted sum of each token's experts, (tokens, hidden), of: x (tokens, hidden); its `chosen` experts (tokens,
wanted) int64; their `weights` (tokens, wanted) of x's dtype; the layer's weights; what makes inner values."""


def gated_by(activation: Callable[[torch.Tensor], torch.Tensor]) -> Gated:
    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return gated


def run_mlp(x: torch.Tensor, w: MlpWeights, gated: Gated) -> torch.Tensor:
    """(tokens, hidden), kept."""
    return F.linear(gated(F.linear(x, w.gate_up)), w.down)


def run_moe(x: torch.Tensor, w: MoeWeights, spec: MoeSpec, gated: Gated, run_experts: RunExperts) -> torch.Tensor:
    """Routed experts plus the shared one: (tokens, hidden), kept."""
    shares = torch.softmax(F.linear(x, w.gate), dim=-1, dtype=torch.float32)
    weights, chosen = shares.topk(spec.experts_per_token, dim=-1)
    if spec.renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    routed = run_experts(x, chosen, weights.to(x.dtype), w, gated)
    return torch.addcmul(routed, torch.sigmoid(F.linear(x, w.shared_gate)), run_mlp(x, w.shared, gated))


def grouped_experts(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, w: MoeWeights, gated: Gated
) -> torch.Tensor:
    """Two grouped matrix products over the tokens sorted by expert. They wait for the device unless torch has a kernel:
    on a CPU, and in bfloat16 on sm_90 and sm_10x."""
    wanted = chosen.shape[1]
    by_expert, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, w.experts, right=True, out_int32=True)
    inner = gated(F.grouped_mm(x[order // wanted], w.gate_up, offs=ends))
    outputs = F.grouped_mm(inner, w.down, offs=ends)
    unsorted = torch.empty_like(outputs).index_copy_(0, order, outputs).view(len(x), wanted, -1)
    return (unsorted * weights.unsqueeze(-1)).sum(dim=1)


def gathers(tokens: int, spec: MoeSpec) -> bool:
    """Whether `static_experts` gathers the experts of so many tokens, which is then less to read."""
    return _GATHER_COST * tokens * spec.experts_per_token <= spec.experts


def static_experts(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, w: MoeWeights, gated: Gated
) -> torch.Tensor:
    """Plain matrix products of static shapes, for any dtype and device: of few tokens' gathered experts, or of every
    expert with every token, whichever reads less memory."""
    gate_up, experts = w.gate_up.transpose(1, 2), len(w.experts)
    if _GATHER_COST * chosen.numel() <= experts:
        rows = chosen.flatten()
        inputs = x.repeat_interleave(chosen.shape[1], dim=0).unsqueeze(-1)
        inner = gated(torch.bmm(gate_up.index_select(0, rows), inputs).squeeze(-1)).unsqueeze(-1)
        down = w.down.transpose(1, 2).index_select(0, rows)
        outputs = torch.bmm(down, inner).view(*chosen.shape, -1)
        return (outputs * weights.unsqueeze(-1)).sum(dim=1)
    inner = gated(F.linear(x, gate_up.flatten(0, 1)).view(len(x), experts, -1))
    share = x.new_zeros(len(x), experts).scatter_(1, chosen, weights).unsqueeze(-1)
    # Masked, not multiplied by 0: what an expert makes of a token that is not for it may be infinite.
    inner = torch.where(share > 0, inner * share, 0)  # (tokens, experts, intermediate)
    return torch.bmm(inner.transpose(0, 1), w.down).sum(dim=0)
