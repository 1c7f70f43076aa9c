"""Attention of one query a row over the cache in place: each row looks as far as its own place, its keys shared out."""

from typing import Any

import torch
import triton
import triton.language as tl

from services.common.engine.device import power_of_two
from services.talker.attention import KeyValueCache, RowAttention

_PROGRAMS = 256  # two for each multiprocessor of a large GPU
_MOST_SPLITS = 32
_BLOCK = 64  # positions


class InPlaceDecode(RowAttention):
    """As DecodeAttention, whatever `length` is. A row that does not advance looks at its first position."""

    def __init__(self, cache: KeyValueCache, places: torch.Tensor, advances: torch.Tensor, length: int) -> None:
        super().__init__(cache, places)
        self._advances = advances

    def look(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return look_in_place(query.contiguous(), keys, values, self.places, self._advances)


@torch.library.custom_op("quartet::look_in_place", mutates_args=())
def look_in_place(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor, advances: torch.Tensor
) -> torch.Tensor:
    """What queries see, as they are.

    Args:
        query: (rows, heads, head_dim), contiguous.
        keys, values: (rows, kv_heads, positions, head_dim), the last one contiguous.
        places, advances: (rows,) int64, contiguous. A row sees its positions up to `places * advances`.
    """
    (rows, heads, size), kv_heads = query.shape, keys.shape[1]
    splits = min(_MOST_SPLITS, power_of_two(_PROGRAMS // (rows * kv_heads)))
    parts = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=query.device)
    sums = torch.empty(2, rows, heads, splits, dtype=torch.float32, device=query.device)
    out = torch.empty_like(query)
    group, block = heads // kv_heads, power_of_two(size)
    numbers: Any = (*keys.stride()[:3], *values.stride()[:3], sums.stride(0), size**-0.5)
    constants: dict[str, Any] = {
        "GROUP": group,
        "ROWS": max(16, power_of_two(group)),  # matrix products have at least 16
        "SIZE": size,
        "SIZE_BLOCK": max(16, block),
        "SPLITS": splits,
        "BLOCK": _BLOCK,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",  # which holds both halves exactly
        "num_warps": 4,
    }
    _look[(rows, kv_heads, splits)](query, keys, values, places, advances, parts, sums, *numbers, **constants)
    together: dict[str, Any] = {"SIZE": size, "SIZE_BLOCK": block, "SPLITS": splits}
    _put_together[(rows * heads,)](parts, sums, out, sums.stride(0), **together)
    return out


@look_in_place.register_fake
def _(query, keys, values, places, advances):
    return torch.empty_like(query)


@triton.jit
def _look(
    query,
    keys,
    values,
    places,
    advances,
    parts,
    sums,
    key_row,
    key_head,
    key_position,
    value_row,
    value_head,
    value_position,
    totals,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    used = tl.load(places + row) * tl.load(advances + row) + 1
    share = tl.cdiv(tl.cdiv(used, BLOCK), SPLITS) * BLOCK
    begin = split * share
    end = tl.minimum(begin + share, used)
    member, column = tl.arange(0, ROWS), tl.arange(0, SIZE_BLOCK)
    inside = column < SIZE
    # Query heads that share a key-value head are neighbours.
    first = (row * tl.num_programs(1) + head) * GROUP
    is_query = (member < GROUP)[:, None] & inside[None, :]
    given = tl.load(query + (first + member)[:, None] * SIZE + column[None, :], mask=is_query, other=0.0).to(tl.float32)
    best = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, SIZE_BLOCK), tl.float32)
    keys += row * key_row + head * key_head
    values += row * value_row + head * value_head
    for at in range(begin, end, BLOCK):
        position = at + tl.arange(0, BLOCK)
        is_seen = (position < end)[:, None] & inside[None, :]
        key = tl.load(keys + position[:, None] * key_position + column[None, :], mask=is_seen, other=0.0)
        value = tl.load(values + position[:, None] * value_position + column[None, :], mask=is_seen, other=0.0)
        score = tl.dot(given, tl.trans(key.to(tl.float32)), input_precision=PRECISION) * scale
        score = tl.where((position < end)[None, :], score, -float("inf"))
        better = tl.maximum(best, tl.max(score, 1))
        kept, weight = tl.exp(best - better), tl.exp(score - better[:, None])
        total = total * kept + tl.sum(weight, 1)
        weight = weight.to(value.dtype).to(tl.float32)
        mixed = mixed * kept[:, None] + tl.dot(weight, value.to(tl.float32), input_precision=PRECISION)
        best = better
    place = (first + member) * SPLITS + split
    tl.store(parts + place[:, None] * SIZE + column[None, :], mixed, mask=is_query)
    tl.store(sums + place, best, mask=member < GROUP)
    tl.store(sums + totals + place, total, mask=member < GROUP)


@triton.jit
def _put_together(parts, sums, out, totals, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, SIZE_BLOCK)
    inside = column < SIZE
    best = tl.load(sums + head * SPLITS + split)
    total = tl.load(sums + totals + head * SPLITS + split)
    weight = tl.exp(best - tl.max(best, 0))
    place = (head * SPLITS + split)[:, None] * SIZE + column[None, :]
    part = tl.load(parts + place, mask=inside[None, :], other=0.0)
    mixed = tl.sum(part * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + head * SIZE + column, mixed.to(out.dtype.element_ty), mask=inside)
