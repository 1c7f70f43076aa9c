"""Routed experts and the shared one, with the kernels of this folder between their matrix products."""

import torch
from torch.nn import functional as F

from services.talker.family import MoeSpec
from services.talker.kernels.combination import combine_and_norm
from services.talker.kernels.routing import MOST_ROWS, Routes, route
from services.talker.moe import Gated, MoeWeights, RunExperts, gathers, grouped_experts, run_mlp


def run_moe_and_norm(
    x: torch.Tensor,
    y: torch.Tensor,
    w: MoeWeights,
    spec: MoeSpec,
    gated: Gated,
    run_experts: RunExperts,
    norm: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`x` plus the experts of its norm `y`, and the next norm of that: (tokens, hidden) each. None: torch's path has to
    do it, for `run_experts` reads every expert, or there are many tokens."""
    if len(y) > MOST_ROWS or (run_experts is not grouped_experts and not gathers(len(y), spec)):
        return None
    routes = route(F.linear(y, w.gate), spec.experts_per_token, spec.renormalize)
    outputs = _grouped(y, routes, w, gated) if run_experts is grouped_experts else _gathered(y, routes, w, gated)
    shared, shared_gate = run_mlp(y, w.shared, gated), F.linear(y, w.shared_gate)
    return combine_and_norm(x, outputs, routes.places, routes.weights, shared, shared_gate, norm, eps)


def _grouped(y: torch.Tensor, routes: Routes, w: MoeWeights, gated: Gated) -> torch.Tensor:
    inner = gated(F.grouped_mm(y[routes.tokens], w.gate_up, offs=routes.ends))
    return F.grouped_mm(inner, w.down, offs=routes.ends)


def _gathered(y: torch.Tensor, routes: Routes, w: MoeWeights, gated: Gated) -> torch.Tensor:
    gate_up = w.gate_up.transpose(1, 2).index_select(0, routes.experts)
    inner = gated(torch.bmm(gate_up, y[routes.tokens].unsqueeze(-1)).squeeze(-1))
    down = w.down.transpose(1, 2).index_select(0, routes.experts)
    return torch.bmm(down, inner.unsqueeze(-1)).squeeze(-1)
