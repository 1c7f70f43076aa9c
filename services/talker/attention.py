"""Attention of talker and code predictor over caches of keys and values, by torch's `scaled_dot_product_attention`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from torch.nn import functional as F

from services.common.engine.attention import additive


class Attend(Protocol):
    """Attention over cached keys and values, which stores those of its queries first.

    `query` is (..., heads, head_dim), as is the result; `key` and `value` are (..., kv_heads, head_dim).
    """

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor: ...


class StepAttention(Attend, Protocol):
    """Attention of one query a row, also in two parts: `look` takes what `slots` gives, with new keys and values.

    Attributes:
        places: (rows,) or (1,) int64, the positions at which they are.
    """

    places: torch.Tensor

    def slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def look(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of all slots: each (layers, slots, kv_heads, positions, head_dim)."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, heads_inside: bool) -> Self:
        """With `heads_inside`, the heads of a position lie side by side in memory."""
        layers, slots, kv_heads, positions, head_dim = shape
        if heads_inside:
            shape = (layers, slots, positions, kv_heads, head_dim)
        # Zeros, not empty: attention weighs masked positions with 0, and 0 times a stray NaN would be NaN.
        keys, values = _zeros(shape, dtype, device), _zeros(shape, dtype, device)
        return cls(keys.transpose(2, 3), values.transpose(2, 3)) if heads_inside else cls(keys, values)

    def rows(self, count: int) -> "KeyValueCache":
        """The first `count` slots."""
        return KeyValueCache(self.keys[:, :count], self.values[:, :count])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU, numpy's take memory only where they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)).view(dtype)


@dataclass(frozen=True)
class PromptChunk:
    """Positions `begin` to `end` of the prompt in `slot`, after the cached ones: rows (end - begin, hidden), and their
    places in the rope (end - begin, 3)."""

    slot: int
    begin: int
    end: int
    rows: torch.Tensor
    positions: torch.Tensor


class PrefillAttention:
    """Queries of chunks of prompts in order: (tokens, heads, head_dim). Each sees its own prompt only.

    Args:
        group: query heads that share a key-value head.
    """

    def __init__(self, cache: KeyValueCache, chunks: Sequence[PromptChunk], group: int) -> None:
        self._cache, self._chunks = cache, chunks
        self._lengths = [chunk.end - chunk.begin for chunk in chunks]
        places = torch.arange(max(chunk.end for chunk in chunks), device=cache.keys.device)
        # CUDA's kernel for grouped heads is flash attention's, which knows no masks and no float32.
        is_grouped = cache.keys.device.type == "cpu" or cache.keys.dtype in (torch.float16, torch.bfloat16)
        # A row for each query head of a key-value head.
        self._masks = [
            None
            if chunk.begin == 0 and is_grouped
            else additive(places[: chunk.end] <= places[chunk.begin : chunk.end, None], cache.keys.dtype).repeat(
                group, 1
            )
            for chunk in chunks
        ]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mixed = []
        parts = (x.split(self._lengths) for x in (query, key, value))
        for chunk, mask, q, k, v in zip(self._chunks, self._masks, *parts, strict=True):
            keys, values = self._cache.keys[layer, chunk.slot], self._cache.values[layer, chunk.slot]
            keys[:, chunk.begin : chunk.end] = k.transpose(0, 1)
            values[:, chunk.begin : chunk.end] = v.transpose(0, 1)
            query_rows = q.transpose(0, 1).unsqueeze(0)
            seen = keys[None, :, : chunk.end], values[None, :, : chunk.end]
            if mask is None:
                y = F.scaled_dot_product_attention(query_rows, *seen, is_causal=True, enable_gqa=True)
            else:
                # Otherwise CUDA takes the MATH path: float32, scores written out. So the query heads that share a
                # key-value head take the place of query positions.
                grouped = query_rows.reshape(1, len(keys), -1, q.shape[-1])
                y = F.scaled_dot_product_attention(grouped, *seen, attn_mask=mask).reshape(query_rows.shape)
            mixed.append(y.squeeze(0).transpose(0, 1))
        return torch.cat(mixed)


class RowAttention(ABC):
    """One query of each of the first slots: (slots, heads, head_dim).

    Args:
        places: (slots,) int64, the position that each slot writes, and up to which it looks.
    """

    def __init__(self, cache: KeyValueCache, places: torch.Tensor) -> None:
        self._cache, self._rows, self.places = cache, len(places), places
        _, _, kv_heads, _, head_dim = cache.keys.shape
        self._index = places[:, None, None, None].expand(-1, kv_heads, 1, head_dim)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self.slots(layer)
        keys.scatter_(2, self._index, key.unsqueeze(2))
        values.scatter_(2, self._index, value.unsqueeze(2))
        return self.look(query, keys, values)

    def slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.keys[layer, : self._rows], self._cache.values[layer, : self._rows]

    @abstractmethod
    def look(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor: ...


class DecodeAttention(RowAttention):
    """Looks at positions of all slots, masked.

    Args:
        advances: (slots,) int64, 0 for a slot whose result means nothing.
        length: no slot looks at positions from here on.
    """

    def __init__(self, cache: KeyValueCache, places: torch.Tensor, advances: torch.Tensor, length: int) -> None:
        super().__init__(cache, places)
        self._length = length
        visible = torch.arange(length, device=places.device) <= places[:, None]
        self._mask = additive(visible[:, None, None], cache.keys.dtype)

    def look(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return _one_query(query, keys[:, :, : self._length], values[:, :, : self._length], self._mask)


class FrameAttention:
    """One query of each row at one position of a frame: (rows, heads, head_dim).

    Args:
        cache: of as many rows, with a position for each pass.
        place: (1,) int64.
        mask: (1, 1, 1, positions) of the cache's dtype, -inf behind `place`.
    """

    def __init__(self, cache: KeyValueCache, place: torch.Tensor, mask: torch.Tensor) -> None:
        self._cache, self.places, self._mask = cache, place, mask

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self.slots(layer)
        keys.index_copy_(2, self.places, key.unsqueeze(2))
        values.index_copy_(2, self.places, value.unsqueeze(2))
        return self.look(query, keys, values)

    def slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.keys[layer], self._cache.values[layer]

    def look(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return _one_query(query, keys, values, self._mask)


def _one_query(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # The query heads that share a key-value head take the place of query positions: nothing is repeated.
    grouped = query.unflatten(1, (keys.shape[1], -1))
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).flatten(1, 2)


Steps = Callable[[KeyValueCache, torch.Tensor, torch.Tensor, int], StepAttention]
"""Makes what DecodeAttention is, of its arguments."""


@dataclass(frozen=True)
class CacheAttention:
    """How prompts and steps look at the talker's cache.

    Attributes:
        prompts: attention of chunks in order of their slots, as PrefillAttention.
        heads_inside: of the cache's memory (`KeyValueCache.zeros`).
        has_lengths: what a step costs depends on its `length`; else on how far each slot looks, whatever `length` is.
    """

    prompts: Callable[[KeyValueCache, Sequence[PromptChunk], int], Attend] = PrefillAttention
    steps: Steps = DecodeAttention
    heads_inside: bool = False
    has_lengths: bool = True


SDPA = CacheAttention()
