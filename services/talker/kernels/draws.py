"""The draw of a code from the best of a vocabulary: `sampling.draw`, in one kernel after torch's top-k."""

import torch
import triton
import triton.language as tl

from services.talker import sampling
from services.talker.sampling import DrawRules


def draw(logits: torch.Tensor, rules: DrawRules, noise: torch.Tensor | None) -> torch.Tensor:
    """As `sampling.draw`. Sums round in another order: noise on the very edge of two codes may draw the other."""
    width = min(rules.width, logits.shape[-1])
    if width <= 1 or noise is None:
        return sampling.draw(logits, rules, noise)
    values, codes = logits.topk(width, dim=-1)
    return draw_of_best(logits, values, codes, rules.temperature, rules.cut, rules.top_p, noise)


@torch.library.custom_op("quartet::draw_of_best", mutates_args=())
def draw_of_best(
    logits: torch.Tensor,
    values: torch.Tensor,
    codes: torch.Tensor,
    temperature: torch.Tensor,
    cut: torch.Tensor,
    top_p: torch.Tensor,
    noise: torch.Tensor,
) -> torch.Tensor:
    """A code a row, (rows,) int64: of `values` and `codes` (rows, width > 1), the best logits in order; of all `logits`
    (rows, codes) where `cut` leaves one. The others are as in DrawRules; noise is (rows,). All are contiguous."""
    drawn = torch.empty_like(noise, dtype=torch.long)
    rows, width = values.shape
    _draw[(rows,)](
        logits,
        values,
        codes,
        temperature,
        cut,
        top_p,
        noise,
        drawn,
        logits.shape[1],
        width,
        cut.shape[1],
        BLOCK=triton.next_power_of_2(width),
        LOGITS_BLOCK=triton.next_power_of_2(logits.shape[1]),
        num_warps=1 if width <= 64 else 4,  # pyright: ignore[reportCallIssue]
    )
    return drawn


@draw_of_best.register_fake
def _(logits, values, codes, temperature, cut, top_p, noise):
    return torch.empty_like(noise, dtype=torch.long)


@triton.jit
def _draw(
    logits,
    values,
    codes,
    temperature,
    cut,
    top_p,
    noise,
    drawn,
    count,
    width,
    cut_row,
    BLOCK: tl.constexpr,
    LOGITS_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(cut + row * cut_row + 1) != 0:
        tl.store(drawn + row, _argmax(logits + row * count, count, LOGITS_BLOCK).to(tl.int64))
    else:
        rank = tl.arange(0, BLOCK)
        inside = rank < width
        best = tl.load(values + row * width).to(tl.float32)
        value = tl.load(values + row * width + rank, mask=inside, other=0.0).to(tl.float32)
        is_cut = tl.load(cut + row * cut_row + rank, mask=inside, other=1) != 0
        # The first of `scaled` is 0 and the largest.
        scaled = tl.where(is_cut, float("-inf"), tl.div_rn(value - best, tl.load(temperature + row)))
        power = tl.exp(scaled)
        share = tl.div_rn(power, tl.sum(power, 0))
        total = tl.cumsum(share.to(tl.float64), 0).to(tl.float32)
        is_kept = (total - share < tl.load(top_p + row)) & inside
        mass = tl.sum((share * is_kept.to(tl.float32)).to(tl.float64), 0).to(tl.float32)
        picked = tl.sum(((total <= tl.load(noise + row) * mass) & inside).to(tl.int32), 0)
        last = tl.sum((is_kept & (share > 0)).to(tl.int32), 0) - 1
        picked = tl.maximum(tl.minimum(picked, last), 0)
        tl.store(drawn + row, tl.load(codes + row * width + picked))


@triton.jit
def _argmax(logits, count, BLOCK: tl.constexpr):
    """The first of the largest; the first that is no number, if there is one."""
    code = tl.arange(0, BLOCK)
    inside = code < count
    x = tl.load(logits + code, mask=inside, other=float("-inf")).to(tl.float32)
    is_nan = x != x
    largest = tl.max(tl.where(is_nan, float("-inf"), x), 0)
    is_best = tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, is_nan, x == largest) & inside
    return tl.min(tl.where(is_best, code, count), 0)
