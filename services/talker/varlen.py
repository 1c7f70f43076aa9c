"""Attention of prompts over the cache in place, by flash attention over sequences of various lengths: one call for all
pieces, without masks or copies of keys.

A slot is a sequence. `cu_seq_k` has where each begins, `seqused_k` how many of its positions count. There is no block
table: with one, torch 2.13 may leave rows unwritten (pytorch/pytorch issue 194167).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from services.talker.attention import SDPA, CacheAttention, KeyValueCache, PromptChunk, Steps
from services.talker.family import TransformerSpec

VarlenAttn = Callable[..., Any]
"""As torch.nn.attention.varlen.varlen_attn."""

_TOLERANCE = 0.05  # of the probe: bfloat16 rounds to 1/256, and values are about 1


def in_place_attention(run: VarlenAttn, steps: Steps) -> CacheAttention:
    return CacheAttention(partial(VarlenPrefill, run), steps, heads_inside=True, has_lengths=False)


class VarlenPrefill:
    """As PrefillAttention, in one call for all chunks, which are in order of their slots."""

    def __init__(self, run: VarlenAttn, cache: KeyValueCache, chunks: Sequence[PromptChunk], group: int) -> None:
        self._run, self._cache, device = run, cache, cache.keys.device
        positions = cache.keys.shape[3]
        begins = [chunk.slot * positions for chunk in chunks]
        ends = [chunk.end for chunk in chunks]
        lengths = [chunk.end - chunk.begin for chunk in chunks]
        self._longest, self._furthest = max(lengths), max(ends)
        numbers = torch.tensor([0, *accumulate(lengths), *begins, begins[-1] + positions, *ends], dtype=torch.int32)
        # In one copy, which waits for nothing.
        pinned = numbers.pin_memory() if device.type == "cuda" else numbers
        counts = len(chunks) + 1, len(chunks) + 1, len(chunks)
        self._queries, self._keys, self._used = pinned.to(device, non_blocking=True).split(counts)
        runs = zip(begins, chunks, strict=True)
        self._index = torch.cat([torch.arange(at + c.begin, at + c.end, device=device) for at, c in runs])

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = _tokens(self._cache.keys[layer]), _tokens(self._cache.values[layer])
        keys.index_copy_(0, self._index, key)
        values.index_copy_(0, self._index, value)
        sizes = self._queries, self._keys, self._longest, self._furthest
        causal = (-1, 0)
        return self._run(query, keys, values, *sizes, window_size=causal, enable_gqa=True, seqused_k=self._used)


def _tokens(slots: torch.Tensor) -> torch.Tensor:
    """(slots, kv_heads, positions, head_dim) with heads inside as (slots * positions, kv_heads, head_dim), a view."""
    by_position = slots.transpose(1, 2)
    return by_position.view(-1, *by_position.shape[2:])


@torch.inference_mode()
def refusal(
    attention: CacheAttention, sizes: TransformerSpec, positions: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why `attention` must not be used on `device`: it fails, or differs from SDPA by more than rounding. None: it may.

    Prompts and a step of three slots of `positions` positions, of which one is idle, are run by both.
    """
    try:
        looked, expected = (_looked(each, sizes, positions, dtype, device) for each in (attention, SDPA))
    except (RuntimeError, TypeError, ValueError) as error:
        return "fails here: " + str(error).partition("\n")[0]
    if torch.allclose(looked, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        return None
    return f"differs here by {float((looked - expected).abs().max()):.2g}"


def _looked(
    attention: CacheAttention, sizes: TransformerSpec, positions: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What random queries see, (queries, heads, head_dim) float32: pieces of two prompts at a time, at last of one
    position, then a step of both."""
    generator = torch.Generator(device).manual_seed(0)

    def rows(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(*shape, sizes.head_dim, dtype=dtype, device=device, generator=generator)

    def new(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Large queries prefer few keys: of long prompts, too, what they see is about 1.
        return rows(count, sizes.heads, scale=4.0), rows(count, sizes.kv_heads), rows(count, sizes.kv_heads)

    shape = (1, 3, sizes.kv_heads, positions, sizes.head_dim)
    cache = KeyValueCache.zeros(shape, dtype, device, attention.heads_inside)
    for kept in (cache.keys, cache.values):
        kept.copy_(rows(*shape[:-1]))
    unused, size, half, seen = torch.empty(0), min(256, positions // 4), positions // 2, []
    for first, second in (
        ((0, size), (0, 5)),
        ((half, half + size), (5, 9)),
        ((positions - 3, positions - 2), (9, 10)),
    ):
        chunks = [PromptChunk(slot, *piece, unused, unused) for slot, piece in ((0, first), (2, second))]
        count = sum(chunk.end - chunk.begin for chunk in chunks)
        seen.append(attention.prompts(cache, chunks, sizes.heads // sizes.kv_heads)(0, *new(count)))
    places = torch.tensor([positions - 2, positions - 1, 10], device=device)
    advances = torch.tensor([1, 0, 1], device=device)
    seen.append(attention.steps(cache, places, advances, positions)(0, *new(3))[::2])
    return torch.cat(seen).float()
