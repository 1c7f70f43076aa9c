"""Attention over cached keys and values: of prompts, of one step of many answers, of the passes of one frame.

Each class stores the keys and values of its queries and mixes what they may look at. A layer calls it with
(layer, query, key, value): query (..., heads, head_dim), key and value (..., kv_heads, head_dim); it returns the mix,
shape of the query.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F


class Attend(Protocol):
    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of all slots: each (layers, slots, kv_heads, positions, head_dim)."""

    keys: torch.Tensor
    values: torch.Tensor

    def rows(self, count: int) -> "KeyValueCache":
        """The first `count` slots."""
        return KeyValueCache(self.keys[:, :count], self.values[:, :count])


@dataclass(frozen=True)
class Piece:
    """Positions `begin` to `end` of the prompt in `slot`; those before `begin` are cached."""

    slot: int
    begin: int
    end: int


class PrefillAttention:
    """Queries are pieces of prompts, one after the other: (tokens, heads, head_dim). Each sees its own prompt only."""

    def __init__(self, cache: KeyValueCache, pieces: Sequence[Piece]) -> None:
        self._cache, self._pieces = cache, pieces
        self._lengths = [piece.end - piece.begin for piece in pieces]
        places = torch.arange(max(piece.end for piece in pieces), device=cache.keys.device)
        self._masks = [
            None if piece.begin == 0 else places[: piece.end] <= places[piece.begin : piece.end, None]
            for piece in pieces
        ]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mixed = []
        parts = (x.split(self._lengths) for x in (query, key, value))
        for piece, mask, q, k, v in zip(self._pieces, self._masks, *parts, strict=True):
            keys, values = self._cache.keys[layer, piece.slot], self._cache.values[layer, piece.slot]
            keys[:, piece.begin : piece.end] = k.transpose(0, 1)
            values[:, piece.begin : piece.end] = v.transpose(0, 1)
            y = F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),
                keys[:, : piece.end].unsqueeze(0),
                values[:, : piece.end].unsqueeze(0),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            mixed.append(y.squeeze(0).transpose(0, 1))
        return torch.cat(mixed)


class DecodeAttention:
    """One query a slot, of the slots from the first on: (slots, heads, head_dim).

    Args:
        places: (slots,) int64, the position that each slot writes, and up to which it looks.
        length: no slot looks at positions from here on.
    """

    def __init__(self, cache: KeyValueCache, places: torch.Tensor, length: int) -> None:
        self._cache, self._rows, self._length = cache, len(places), length
        _, _, kv_heads, _, head_dim = cache.keys.shape
        self._index = places[:, None, None, None].expand(-1, kv_heads, 1, head_dim)
        visible = torch.arange(length, device=places.device) <= places[:, None]
        self._mask = visible[:, None, None]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.keys[layer, : self._rows], self._cache.values[layer, : self._rows]
        keys.scatter_(2, self._index, key.unsqueeze(2))
        values.scatter_(2, self._index, value.unsqueeze(2))
        # The query heads that share a key-value head take the place of query positions: nothing is repeated.
        grouped = query.unflatten(1, (key.shape[1], -1))
        length = self._length
        mixed = F.scaled_dot_product_attention(
            grouped, keys[:, :, :length], values[:, :, :length], attn_mask=self._mask
        )
        return mixed.flatten(1, 2)


class FrameAttention:
    """One query a row at position `place` of a frame, the same in all rows: (rows, heads, head_dim).

    Args:
        cache: of as many rows, with a position for each pass.
        place: (1,) int64.
        mask: (1, 1, 1, positions) bool, true up to `place`.
    """

    def __init__(self, cache: KeyValueCache, place: torch.Tensor, mask: torch.Tensor) -> None:
        self._cache, self._place, self._mask = cache, place, mask

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_copy_(2, self._place, key.unsqueeze(2))
        values.index_copy_(2, self._place, value.unsqueeze(2))
        grouped = query.unflatten(1, (key.shape[1], -1))
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask).flatten(1, 2)
