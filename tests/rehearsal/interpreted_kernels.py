"""The talker's Triton kernels beside torch's operators: interpreted on the CPU, or on a GPU. `test_kernels.py` runs
this file in a process of its own, for Triton decides at its import: TRITON_INTERPRET=1."""

import os

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from triton.runtime import interpreter

from services.common.engine.device import Capturer, CudaGraphs
from services.talker import sampling
from services.talker.attention import SDPA, CacheAttention
from services.talker.family import MoeSpec, SamplingDefaults, TalkerSpec, TransformerSpec
from services.talker.kernels import attention
from services.talker.kernels.attention import InPlaceDecode
from services.talker.kernels.combination import combine_and_norm
from services.talker.kernels.draws import draw
from services.talker.kernels.gates import silu_and_multiply
from services.talker.kernels.noise import uniform
from services.talker.kernels.norms import add_and_norm
from services.talker.kernels.rotation import rotate_and_store
from services.talker.kernels.routing import route
from services.talker.kernels.stack import FUSED
from services.talker.layers import rotate
from services.talker.model import TalkerModel, empty_model
from services.talker.moe import gated_by, grouped_experts, static_experts
from services.talker.runner import Advance, StepInput, TalkerRunner
from services.talker.sampling import SamplingRows, resolve
from services.talker.steps import TORCH, StepKernels
from services.talker.varlen import in_place_attention
from tests.support.references.varlen import varlen_attn
from tests.support.stage.replay import ReplayedOps

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-6
DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") else "cuda")


@pytest.fixture(autouse=True)
def rounding_as_a_gpu_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts bits off where a GPU rounds to the nearest bfloat16."""
    cut = interpreter._convert_float

    def converted(x: np.ndarray, source, target, rounding) -> np.ndarray:
        if (source.name, target.name) != ("fp32", "bf16"):
            return cut(x, source, target, rounding)
        return torch.from_numpy(np.array(x)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
    if DEVICE.type == "cpu":  # a program takes the interpreter milliseconds
        monkeypatch.setattr(attention, "_PROGRAMS", 32)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def random_noise(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_one_rounding_apart(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = max(torch.finfo(actual.dtype).eps, 1e-6)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 96])
def test_a_sum_and_its_norm(dtype: torch.dtype, size: int) -> None:
    x, y = random(3, size, dtype=dtype), random(3, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    total, normed = add_and_norm(x, y, weight, EPS)
    assert torch.equal(total, x + y)
    assert_one_rounding_apart(normed, F.rms_norm(x + y, (size,), weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_values(dtype: torch.dtype) -> None:
    gate_up = random(2, 3, 2 * 1100, dtype=dtype, scale=4.0)  # more than a block
    assert_one_rounding_apart(silu_and_multiply(gate_up), gated_by(F.silu)(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "size"), [(3, 4, 2, 16), (1, 2, 1, 24)])
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize("has_one_place", [True, False])
def test_queries_are_turned_and_keys_stored(
    dtype: torch.dtype, rows: int, heads: int, kv_heads: int, size: int, is_normed: bool, has_one_place: bool
) -> None:
    qkv = random(rows, (heads + 2 * kv_heads) * size, dtype=dtype)
    turning = heads + kv_heads
    norms = random(turning, size, dtype=dtype, seed=1) if is_normed else None
    count = 1 if has_one_place else rows
    cos, sin = (random(count, 1, size, dtype=dtype, seed=seed) for seed in (2, 3))
    places = torch.tensor([5] if has_one_place else [0, 6, 3][:rows], device=DEVICE)
    caches = [random(rows + 2, kv_heads, 7, size, dtype=dtype, seed=seed) for seed in (4, 5)]
    keys, values = (cache.clone()[1 : rows + 1] for cache in caches)
    query = rotate_and_store(qkv, norms, cos, sin, places, keys, values, EPS)

    vectors = qkv.view(rows, -1, size)
    expected = vectors[:, :turning]
    if norms is not None:
        expected = F.rms_norm(expected, (size,), None, EPS) * norms
    expected = rotate(expected, cos, sin)
    expected_keys, expected_values = (cache[1 : rows + 1].clone() for cache in caches)
    for row in range(rows):
        expected_keys[row, :, places[row % count]] = expected[row, heads:]
        expected_values[row, :, places[row % count]] = vectors[row, turning:]
    # A rounding more before the rope is as large as the largest of a pair.
    for actual, wanted in ((query, expected[:, :heads]), (keys, expected_keys)):
        slack = 4 * max(torch.finfo(dtype).eps, 1e-6)
        torch.testing.assert_close(actual, wanted, rtol=slack, atol=slack)
        assert (actual == wanted).float().mean() > (0.98 if dtype != torch.float32 else 0)
    assert torch.equal(values, expected_values)


def test_noise_is_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator).to(DEVICE)
    frames = torch.tensor([0, 1, 2, 4095, 2**40], device=DEVICE)
    for groups in (1, 16):
        assert torch.equal(uniform(seeds, frames, groups), sampling.uniform(seeds, frames, groups))


# temperature, top_k, top_p
RULES = [(0.9, 50, 1.0), (1.0, 50, 0.8), (0.7, 5, 1.0), (1e-4, 40, 0.9), (2.0, 0, 0.5), (1.0, 0, 1.0), (1.0, 1, 1.0)]
RULES += [(0.0, 0, 1.0)]


def rules_of(rows: int) -> SamplingRows:
    """RULES in turn."""
    rules = SamplingRows(rows, DEVICE)
    for row in range(rows):
        rules.set(row, *RULES[row % len(RULES)])
    return rules


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # of the latter many are equal
@pytest.mark.parametrize(("codes", "width"), [(300, 64), (300, 300), (300, 3072), (40, 64), (300, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_the_same_codes_are_drawn(dtype: torch.dtype, codes: int, width: int, seed: int) -> None:
    rows = 96
    logits = random(rows, codes, dtype=dtype, seed=seed, scale=3.0)
    logits[8:16] = logits[8:16].round()  # few values: most are equal
    logits[16:24, ::3] = -torch.inf
    noise = random_noise(rows, seed)
    noise[24:32] = 0.0
    rules = rules_of(rows).first(rows, width)
    assert torch.equal(draw(logits, rules, noise), sampling.draw(logits, rules, noise))


@pytest.mark.parametrize("width", [64, 300])
def test_the_largest_noise_draws_a_code_of_the_end(width: int) -> None:
    """There shares may be as small as the rounding of their sums, so that another code is as right."""
    rows = 2 * len(RULES)
    logits, noise = random(rows, 300, scale=3.0), torch.full((rows,), 1 - 2.0**-24, device=DEVICE)
    rules = rules_of(rows).first(rows, width)
    values, best = logits.double().topk(width)
    shares = (values / rules.temperature).masked_fill(rules.cut, -torch.inf).softmax(dim=-1)
    shares = torch.where(shares.cumsum(dim=-1) - shares < rules.top_p, shares, 0)
    behind = shares.sum(dim=-1, keepdim=True) - shares.cumsum(dim=-1)
    drawn = best == draw(logits, rules, noise).unsqueeze(-1)
    assert (drawn.sum(dim=-1) == 1).all()
    assert (shares[drawn] > 0).all()
    assert (behind[drawn] < 1e-6).all()


@pytest.mark.parametrize("width", [64, 300])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_that_are_no_numbers_get_the_same_codes(width: int) -> None:
    rows = 6 * len(RULES)
    logits = random(rows, 300)
    spoilt = logits.unflatten(0, (6, -1))
    spoilt[0] = torch.nan
    spoilt[1, :, 17] = torch.nan
    spoilt[2, :, 18] = torch.inf
    spoilt[3] = -torch.inf
    spoilt[4] = 1e38
    spoilt[5, :, [3, 200]] = torch.nan
    rules, noise = rules_of(rows).first(rows, width), random_noise(rows)
    assert torch.equal(draw(logits, rules, noise), sampling.draw(logits, rules, noise))


def test_noise_on_the_edge_of_two_codes_draws_the_second() -> None:
    logits, rules = torch.full((3, 300), -9.0, device=DEVICE), SamplingRows(3, DEVICE)
    logits[:, [7, 90]] = 1.0
    for row in range(3):
        rules.set(row, 1.0, 2, 1.0)
    noise = torch.tensor([0.5 - 2.0**-24, 0.5, 0.75], device=DEVICE)
    drawn = draw(logits, rules.first(3, 64), noise)
    assert torch.equal(drawn, sampling.draw(logits, rules.first(3, 64), noise))
    assert drawn[0] != drawn[1] == drawn[2]


def test_greedy_steps_are_torch_s() -> None:
    logits = random(8, 300)
    for width, noise in ((0, random_noise(8)), (1, random_noise(8)), (64, None)):
        assert torch.equal(draw(logits, rules_of(8).first(8, width), noise), logits.argmax(dim=-1))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 16), (5, 24), (64, 16)])
def test_tokens_are_routed_and_sorted(dtype: torch.dtype, renormalize: bool, tokens: int, experts: int) -> None:
    wanted, generator = 3, torch.Generator().manual_seed(tokens)
    order = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)])
    logits = (order / 4).to(DEVICE, dtype)  # none are equal
    shares, chosen = logits.softmax(dim=-1, dtype=torch.float32).topk(wanted, dim=-1)
    routes = route(logits, wanted, renormalize)
    assert torch.equal(routes.chosen, chosen)
    assert_one_rounding_apart(routes.weights, (shares / (shares.sum(-1, keepdim=True) if renormalize else 1)).to(dtype))
    by_expert, sorted_pairs = chosen.flatten().sort(stable=True)
    assert torch.equal(routes.experts, by_expert)
    assert torch.equal(routes.tokens, sorted_pairs // wanted)
    assert torch.equal(routes.places.flatten()[sorted_pairs], torch.arange(tokens * wanted, device=DEVICE))
    counted = torch.searchsorted(by_expert, torch.arange(experts, device=DEVICE), right=True, out_int32=True)
    assert torch.equal(routes.ends, counted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tokens_that_are_no_numbers_spoil_no_others() -> None:
    logits = random(6, 16)
    logits[1] = torch.nan
    logits[2, 3] = torch.inf
    logits[4, 5] = torch.nan
    logits[5] = 0.0
    routes, clean = route(logits, 3, True), route(logits[[0, 3]], 3, True)
    assert torch.equal(routes.chosen[[0, 3]], clean.chosen)
    assert torch.equal(routes.weights[[0, 3]], clean.weights)
    assert routes.weights[1].isnan().all()
    assert routes.chosen[5].tolist() == [0, 1, 2]
    assert sorted(routes.places.flatten().tolist()) == list(range(18))
    assert int(routes.ends[-1]) == 18


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_combined(dtype: torch.dtype) -> None:
    tokens, wanted, size = 3, 2, 96
    x, shared = (random(tokens, size, dtype=dtype, seed=seed) for seed in (0, 1))
    outputs = random(tokens * wanted, size, dtype=dtype, seed=2)
    weights, gate = random(tokens, wanted, dtype=dtype, seed=3), random(tokens, 1, dtype=dtype, seed=4)
    norm, places = random(size, dtype=dtype, seed=5), torch.randperm(tokens * wanted).to(DEVICE).view(tokens, wanted)
    total, normed = combine_and_norm(x, outputs, places, weights, shared, gate, norm, EPS)
    routed = (outputs[places] * weights.unsqueeze(-1)).sum(dim=1)
    expected = x + torch.addcmul(routed, torch.sigmoid(gate), shared)
    slack = 4 * max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(total, expected, rtol=slack, atol=slack)
    assert (total == expected).float().mean() > (0.98 if dtype != torch.float32 else 0)
    assert_one_rounding_apart(normed, F.rms_norm(total, (size,), norm, EPS))


SIZES = TransformerSpec(2, 32, 4, 2, 8, 48, 90, EPS, 10_000.0, "silu")
NARROW = TransformerSpec(2, 24, 2, 1, 12, 40, 90, EPS, 10_000.0, "gelu", qkv_bias=True, o_bias=True, qk_norm=False)
DEFAULTS = SamplingDefaults(0.9, 50, 1.0, 1.1, 50, 0.9, 50, 0.9)
MOE = MoeSpec(experts=16, experts_per_token=3, intermediate=12, shared_intermediate=20, renormalize=True)


def spec_of(talker: TransformerSpec, moe: MoeSpec | None, predictor: TransformerSpec | None) -> TalkerSpec:
    groups = 3 if predictor else 1
    return TalkerSpec(talker, groups, 64, 40, ("one",), (38,), frozenset(), DEFAULTS, moe=moe, predictor=predictor)


SPECS = {
    "grouped experts": spec_of(SIZES, MOE, None),
    "static experts, and a predictor": spec_of(SIZES, MOE, SIZES),
    "dense, and a predictor of another width": spec_of(SIZES, None, NARROW),
    "biases, no norm of queries, no predictor": spec_of(NARROW, None, None),
}


@torch.inference_mode()
def model_of(spec: TalkerSpec, dtype: torch.dtype) -> TalkerModel:
    model = empty_model(spec, DEVICE, dtype)
    for seed, parameter in enumerate(model.parameters()):
        parameter.copy_(random(*parameter.shape, seed=seed, scale=0.3))
    model.text_table = random(spec.text_vocab, spec.talker.hidden, dtype=dtype)
    model.precompute()
    model.use_experts(static_experts)
    return model


def said(
    model: TalkerModel, kernels: StepKernels, capturer: Capturer | None, look: CacheAttention = SDPA
) -> torch.Tensor:
    """(frames, slots, groups): a greedy slot, one that keeps 50 codes, one that keeps all; then two of them."""
    runner = TalkerRunner(model, 3, 60, capturer, kernels=kernels, attention=look)
    for slot, rule in enumerate(({"temperature": 0}, {}, {"top_k": 0, "predictor_top_k": 0})):
        runner.assign(slot, resolve(model.spec.defaults, seed=slot, **rule))
    frames = []
    for frame in range(6):
        slots = range(3) if frame % 2 else range(2)
        widths = [0, 50, 90]
        batch = [
            StepInput(slot, frame, widths[slot], widths[slot], Advance(7 + slot, 5 * slot + frame, frame))
            for slot in slots
        ]
        frames.append(F.pad(runner.step(batch), (0, 0, 0, 3 - len(batch))))
    return torch.stack(frames)


@pytest.mark.parametrize("name", SPECS)
def test_captured_steps_say_what_torch_s_say(name: str) -> None:
    model = model_of(SPECS[name], torch.float32)
    if name == "grouped experts":
        model.use_experts(grouped_experts)
    expected = said(model, TORCH, None)
    assert len(expected.unique()) > 10
    in_place = in_place_attention(varlen_attn, InPlaceDecode)
    capturer = ReplayedOps() if DEVICE.type == "cpu" else CudaGraphs(DEVICE)
    assert torch.equal(said(model, FUSED, capturer, in_place if "predictor" in name else SDPA), expected)


@torch.inference_mode()
def test_states_in_bfloat16_are_as_close_to_float32_as_torch_s() -> None:
    spec = SPECS["static experts, and a predictor"]
    states = {}
    for dtype, kernels in ((torch.float32, TORCH), (torch.bfloat16, TORCH), (torch.bfloat16, FUSED)):
        model = model_of(spec, torch.bfloat16)
        if dtype == torch.float32:
            values = {name: value.float() for name, value in model.state_dict().items()}
            model = model_of(spec, dtype)
            model.load_state_dict(values)
            model.precompute()
        runner = TalkerRunner(model, 2, 60, kernels=kernels)
        runner._frame_row.copy_(random(2, spec.talker.hidden, dtype=torch.bfloat16, seed=7))
        runner.step([StepInput(slot, 0, 0, 0, Advance(3, 0, 0)) for slot in range(2)])
        states[dtype, kernels is FUSED] = runner._hidden.float()
    exact = states[torch.float32, False]
    torchs, fused = (float((states[torch.bfloat16, is_fused] - exact).norm()) for is_fused in (False, True))
    assert 0 < fused < 1.5 * torchs
