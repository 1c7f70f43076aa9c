"""The router of experts: which ones each token goes to, and the tokens in the order of their experts."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

MOST_ROWS = 64  # one program sees all of them


class Routes(NamedTuple):
    """`wanted` experts of each token, by falling weight; and these pairs sorted by expert, then by token.

    Attributes:
        chosen: (tokens, wanted) int64.
        weights: (tokens, wanted), of the logits' dtype.
        places: of the pairs, among the sorted ones: (tokens, wanted) int64.
        tokens, experts: of the sorted pairs, (tokens * wanted,) int64 each.
        ends: (experts,) int32, where each expert's pairs end.
    """

    chosen: torch.Tensor
    weights: torch.Tensor
    places: torch.Tensor
    tokens: torch.Tensor
    experts: torch.Tensor
    ends: torch.Tensor


def route(logits: torch.Tensor, wanted: int, renormalize: bool) -> Routes:
    """Of the router's logits (tokens, experts), contiguous, of up to MOST_ROWS tokens."""
    return Routes(*_route(logits, wanted, renormalize))


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("quartet::route", mutates_args=())
def _route(
    logits: torch.Tensor, wanted: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    routes = _routes_like(logits, wanted)
    rows, experts = logits.shape
    blocks = triton.next_power_of_2(rows), triton.next_power_of_2(experts)
    constants: Any = experts, wanted, renormalize, *blocks
    warps: Any = {"num_warps": 8 if rows > 8 else 4}
    _route_all[(1,)](logits, *routes, rows, *constants, **warps)
    return routes


@_route.register_fake
def _(logits, wanted, renormalize):
    return _routes_like(logits, wanted)


def _routes_like(logits: torch.Tensor, wanted: int) -> Tensors:
    (rows, experts), long = logits.shape, torch.long
    pairs = rows * wanted
    return (
        logits.new_empty(rows, wanted, dtype=long),
        logits.new_empty(rows, wanted),
        logits.new_empty(rows, wanted, dtype=long),
        logits.new_empty(pairs, dtype=long),
        logits.new_empty(pairs, dtype=long),
        logits.new_empty(experts, dtype=torch.int32),
    )


@triton.jit
def _route_all(
    logits,
    chosen,
    weights,
    places,
    tokens,
    experts,
    ends,
    rows,
    EXPERTS: tl.constexpr,
    WANTED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column = tl.arange(0, ROW_BLOCK), tl.arange(0, BLOCK)
    expert = tl.broadcast_to(column[None, :], (ROW_BLOCK, BLOCK))
    inside = (row < rows)[:, None] & (expert < EXPERTS)
    logit = tl.load(logits + row[:, None] * EXPERTS + expert, mask=inside, other=float("-inf")).to(tl.float32)
    highest = tl.max(tl.where(row[:, None] < rows, logit, 0.0), 1)
    power = tl.exp(tl.where(row[:, None] < rows, logit - highest[:, None], 0.0))
    share = power / tl.sum(power, 1)[:, None]
    # What is no number counts as 0, and what is no expert less: each token gets different experts, whatever comes.
    order = tl.where(expert < EXPERTS, tl.where(share == share, share, 0.0), -2.0)
    left = order
    for _ in range(WANTED):  # not unrolled, which would compile for a quarter of a minute
        left = tl.where(expert == _best(left, expert, BLOCK)[:, None], -1.0, left)
    is_chosen = (left == -1.0) & inside
    total = tl.sum(tl.where(is_chosen, share, 0.0), 1)
    count = tl.sum(is_chosen.to(tl.int32), 0)
    end = tl.cumsum(count, 0)
    tl.store(ends + column, end, mask=column < EXPERTS)
    place = (end - count)[None, :] + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    for rank in range(WANTED):
        best = _best(order, expert, BLOCK)
        is_best = expert == best[:, None]
        weight = tl.sum(tl.where(is_best, share, 0.0), 1)
        if RENORMALIZE:
            weight = weight / total
        found = tl.sum(tl.where(is_best, place, 0), 1)
        pair = row * WANTED + rank
        tl.store(chosen + pair, best.to(tl.int64), mask=row < rows)
        tl.store(weights + pair, weight.to(weights.dtype.element_ty), mask=row < rows)
        tl.store(places + pair, found.to(tl.int64), mask=row < rows)
        tl.store(tokens + found, row.to(tl.int64), mask=row < rows)
        tl.store(experts + found, best.to(tl.int64), mask=row < rows)
        order = tl.where(is_best, -1.0, order)


@triton.jit
def _best(order, expert, BLOCK: tl.constexpr):
    """The first of the largest in each row."""
    return tl.min(tl.where(order == tl.max(order, 1)[:, None], expert, BLOCK), 1)
