"""Norm and rope of new queries and keys, and the cache's new position."""

import torch
import triton
import triton.language as tl


@torch.library.custom_op("quartet::rotate_and_store", mutates_args=("keys", "values"))
def rotate_and_store(
    qkv: torch.Tensor,
    norms: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    places: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Stores keys and values; returns the queries (rows, heads, head_dim).

    Args:
        qkv: (rows, (heads + 2 kv_heads) head_dim), contiguous.
        norms: weights (heads + kv_heads, head_dim), contiguous; None: nothing is normed.
        cos, sin: as Rope makes them: (rows or 1, 1, head_dim), contiguous.
        places: positions in the cache, (rows,) or (1,) int64.
        keys, values: (rows, kv_heads, positions, head_dim), the last one contiguous.
    """
    query = _query_like(qkv, keys)
    rows, heads, size = query.shape
    kv_heads = keys.shape[1]
    _rotate_and_store[(rows, heads + 2 * kv_heads)](
        qkv,
        qkv if norms is None else norms,
        cos,
        sin,
        places,
        query,
        keys,
        values,
        size if cos.numel() > size else 0,
        1 if len(places) > 1 else 0,
        *keys.stride()[:3],
        *values.stride()[:3],
        eps,  # pyright: ignore[reportCallIssue]
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        IS_NORMED=norms is not None,
        num_warps=1,  # pyright: ignore[reportCallIssue]
    )
    return query


@rotate_and_store.register_fake
def _(qkv, norms, cos, sin, places, keys, values, eps):
    return _query_like(qkv, keys)


def _query_like(qkv: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    _, kv_heads, _, size = keys.shape
    return qkv.new_empty(len(qkv), qkv.shape[1] // size - 2 * kv_heads, size)


@triton.jit
def _rotate_and_store(
    qkv,
    norms,
    cos,
    sin,
    places,
    query,
    keys,
    values,
    angle_row,
    place_row,
    key_row,
    key_head,
    key_position,
    value_row,
    value_head,
    value_position,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_NORMED: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    vector = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * SIZE
    given = tl.load(vector + column, mask=inside, other=0.0)
    place = tl.load(places + row * place_row)
    if head >= HEADS + KV_HEADS:
        slot = values + row * value_row + (head - HEADS - KV_HEADS) * value_head + place * value_position
        tl.store(slot + column, given, mask=inside)
    else:
        dtype = given.dtype
        paired = (column + SIZE // 2) % SIZE
        x = given.to(tl.float32)
        y = tl.load(vector + paired, mask=inside, other=0.0).to(tl.float32)
        if IS_NORMED:
            scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
            weights = norms + head * SIZE
            x = (x * scale).to(dtype).to(tl.float32) * tl.load(weights + column, mask=inside, other=0.0).to(tl.float32)
            y = (y * scale).to(dtype).to(tl.float32) * tl.load(weights + paired, mask=inside, other=0.0).to(tl.float32)
            x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
        turn = row * angle_row + column
        along = (x * tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        turned = (along + y * tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        if head < HEADS:
            tl.store(query + (row * HEADS + head) * SIZE + column, turned, mask=inside)
        else:
            slot = keys + row * key_row + (head - HEADS) * key_head + place * key_position
            tl.store(slot + column, turned, mask=inside)
