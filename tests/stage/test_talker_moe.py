"""The experts of a layer give the same by every path, for few tokens and for many."""

import pytest
import torch
from torch.nn import functional as F

from services.talker.family import MoeSpec
from services.talker.moe import MlpWeights, MoeWeights, gated_by, grouped_experts, run_moe, static_experts
from tests.support.stage.replay import ReplayedOps

HIDDEN, INNER = 24, 16
SILU = gated_by(F.silu)
SPEC = MoeSpec(experts=32, experts_per_token=3, intermediate=INNER, shared_intermediate=INNER, renormalize=True)


def weights(dtype: torch.dtype = torch.float32) -> MoeWeights:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    gate_up, down = random(SPEC.experts, 2 * INNER, HIDDEN), random(SPEC.experts, HIDDEN, INNER)
    shared = MlpWeights(random(2 * INNER, HIDDEN), random(HIDDEN, INNER))
    numbers = torch.arange(SPEC.experts)
    return MoeWeights(
        random(SPEC.experts, HIDDEN), gate_up.transpose(1, 2), down.transpose(1, 2), shared, random(1, HIDDEN), numbers
    )


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 64])  # up to 3 tokens gather their experts
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_static_experts_give_what_grouped_ones_give(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    w, x = weights(dtype), inputs(tokens, dtype)
    grouped, static = (run_moe(x, w, SPEC, SILU, path) for path in (grouped_experts, static_experts))
    torch.testing.assert_close(static, grouped, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [2, 16])
def test_a_capture_of_static_experts_follows_the_tokens_to_other_experts(tokens: int) -> None:
    w, x = weights(), inputs(tokens)
    captured = ReplayedOps().capture(lambda: run_moe(x, w, SPEC, SILU, static_experts))
    x.copy_(inputs(100)[:tokens])
    captured.replay()
    expected = run_moe(x, w, SPEC, SILU, grouped_experts)
    torch.testing.assert_close(captured.output, expected, rtol=1e-5, atol=1e-5)


def test_an_expert_that_overflows_spoils_only_the_tokens_that_chose_it() -> None:
    w, x = weights(), inputs(16)
    chosen = torch.softmax(x @ w.gate.T, dim=-1).topk(SPEC.experts_per_token).indices
    expert = int(chosen[0, 0])
    w.gate_up[expert].fill_(torch.inf)
    spoilt = (chosen == expert).any(dim=1)
    assert 0 < spoilt.sum() < len(x)
    routed = run_moe(x, w, SPEC, SILU, static_experts)
    assert torch.equal(routed.isfinite().all(dim=1), ~spoilt)
