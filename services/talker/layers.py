"""Building blocks of talker and code predictor: attention over caches, rotary positions, a layer, a projection.

Names are those of the published weights, unless several of them are one matrix here (see `published_parameters`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from services.common.engine.activations import activation
from services.common.engine.attention import additive
from services.talker.family import MoeSpec, ProjectionSpec, TransformerSpec
from services.talker.moe import (
    Mlp,
    MlpWeights,
    MoeWeights,
    RunExperts,
    SparseMoe,
    gated_by,
    grouped_experts,
    run_mlp,
    run_moe,
)


class Attend(Protocol):
    """Attention over cached keys and values, which stores those of its queries first.

    `query` is (..., heads, head_dim), as is the result; `key` and `value` are (..., kv_heads, head_dim).
    """

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
        self._lengths = [len(chunk.rows) for chunk in chunks]
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


class DecodeAttention:
    """One query of each of the first slots: (slots, heads, head_dim).

    Args:
        places: (slots,) int64, the position that each slot writes, and up to which it looks.
        length: no slot looks at positions from here on.
    """

    def __init__(self, cache: KeyValueCache, places: torch.Tensor, length: int) -> None:
        self._cache, self._rows, self._length, self.places = cache, len(places), length, places
        _, _, kv_heads, _, head_dim = cache.keys.shape
        self._index = places[:, None, None, None].expand(-1, kv_heads, 1, head_dim)
        visible = torch.arange(length, device=places.device) <= places[:, None]
        self._mask = additive(visible[:, None, None], cache.keys.dtype)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self.slots(layer)
        keys.scatter_(2, self._index, key.unsqueeze(2))
        values.scatter_(2, self._index, value.unsqueeze(2))
        return self.look(query, keys, values)

    def slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.keys[layer, : self._rows], self._cache.values[layer, : self._rows]

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


# cos and signed sin, as Rope makes them
Angles = tuple[torch.Tensor, torch.Tensor]


class Rope(nn.Module):
    """Rotary positions (Su et al., 2021).

    With sections (t, h, w) the first t frequencies turn with time, the next h with the height, the last w with the
    width. If they are interleaved, of each three frequencies the second turns with the height and the third with the
    width, as long as their sections last; all others turn with time.
    """

    inv_freq: torch.Tensor
    axis: torch.Tensor

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        # Computed on the CPU whatever the default device is: parameters are made on the meta device.
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device="cpu") / spec.head_dim
        self.register_buffer("inv_freq", 1.0 / spec.rope_theta**exponents, persistent=False)
        self.register_buffer("axis", _axis_of_frequencies(spec), persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        """Angles, each (..., 1, head_dim), of `positions` (..., 3) of any number dtype."""
        angles = (positions.float()[..., self.axis] * self.inv_freq).unsqueeze(-2)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def _axis_of_frequencies(spec: TransformerSpec) -> torch.Tensor:
    """0, 1 or 2 for frequencies of time, height or width: (head_dim / 2,) int64 on the CPU."""
    axis = torch.zeros(spec.head_dim // 2, dtype=torch.long, device="cpu")
    if spec.rope_sections is None:
        return axis
    time, height, width = spec.rope_sections
    if spec.rope_interleaved:
        axis[1 : 3 * height : 3], axis[2 : 3 * width : 3] = 1, 2
    else:
        axis[time : time + height], axis[time + height : time + height + width] = 1, 2
    return axis


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Turns `x` (..., heads, head_dim), whose halves pair up, by the angles of `Rope`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)


class Attention(nn.Module):
    """Parameters of grouped-query attention."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        width = spec.heads * spec.head_dim
        self.spec = spec
        self.qkv_proj = nn.Linear(spec.hidden, width + 2 * spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(width, spec.hidden, bias=spec.o_bias)
        if spec.qk_norm:
            self.q_norm = nn.RMSNorm(spec.head_dim, spec.norm_eps)
            self.k_norm = nn.RMSNorm(spec.head_dim, spec.norm_eps)


class LayerWeights(NamedTuple):
    input_norm: torch.Tensor
    qkv: tuple[torch.Tensor, torch.Tensor | None]  # weight, bias
    qk_norm: torch.Tensor | None  # (heads + kv_heads, head_dim)
    o: tuple[torch.Tensor, torch.Tensor | None]
    mlp_norm: torch.Tensor
    mlp: MlpWeights | MoeWeights


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to its input.

    The modules hold parameters. The computation uses plain tensors, as a parameter costs a CPU as much to find as a
    small kernel to run.
    """

    weights: LayerWeights

    def __init__(self, spec: TransformerSpec, layer: int, moe: MoeSpec | None) -> None:
        super().__init__()
        self.spec, self.layer, self.moe = spec, layer, moe
        self.self_attn = Attention(spec)
        self.mlp = SparseMoe(spec, moe) if moe else Mlp(spec.hidden, spec.intermediate)
        self.run_experts: RunExperts = grouped_experts
        self.input_layernorm = nn.RMSNorm(spec.hidden, spec.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden, spec.norm_eps)
        self.gated = gated_by(activation(spec.activation).forward)

    def precompute(self) -> None:
        spec, attn, qk_norm = self.spec, self.self_attn, None
        if spec.qk_norm:
            norms = (attn.q_norm.weight, spec.heads), (attn.k_norm.weight, spec.kv_heads)
            qk_norm = torch.cat([weight.expand(count, -1) for weight, count in norms])
        self.weights = LayerWeights(
            self.input_layernorm.weight,
            (attn.qkv_proj.weight, attn.qkv_proj.bias),
            qk_norm,
            (attn.o_proj.weight, attn.o_proj.bias),
            self.post_attention_layernorm.weight,
            self.mlp.weights(),
        )

    def forward(self, x: torch.Tensor, rope: Angles, attend: Attend) -> torch.Tensor:
        """`x` (tokens, hidden), kept; angles (tokens or 1, 1, head_dim) each."""
        spec, w = self.spec, self.weights
        qkv = F.linear(norm(x, w.input_norm, spec), *w.qkv).view(len(x), -1, spec.head_dim)
        turning = spec.heads + spec.kv_heads  # queries and keys, in this order; values follow
        queries_keys, values = qkv[:, :turning], qkv[:, turning:]
        if w.qk_norm is not None:
            queries_keys = F.rms_norm(queries_keys, (spec.head_dim,), None, spec.norm_eps) * w.qk_norm
        turned = rotate(queries_keys, *rope)
        mixed = attend(self.layer, turned[:, : spec.heads], turned[:, spec.heads :], values)
        x = x + F.linear(mixed.reshape(len(x), -1), *w.o)
        y = norm(x, w.mlp_norm, spec)
        if isinstance(w.mlp, MlpWeights):
            return x + run_mlp(y, w.mlp, self.gated)
        assert self.moe is not None
        return x + run_moe(y, w.mlp, self.moe, self.gated, self.run_experts)


def norm(x: torch.Tensor, weight: torch.Tensor, spec: TransformerSpec) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, spec.norm_eps)


def projection(spec: ProjectionSpec | None, talker: TransformerSpec) -> nn.Module | None:
    """Takes text embeddings or thinker states, (..., inputs), into the talker's space, (..., hidden)."""
    if spec is None:
        return None
    if spec.inner is None:
        return nn.Linear(spec.inputs, talker.hidden, bias=spec.bias)
    inner = nn.Linear(spec.inputs, spec.inner, bias=spec.bias)
    outer = nn.Linear(spec.inner, talker.hidden, bias=spec.bias)
    return nn.Sequential(OrderedDict(linear_fc1=inner, activation=activation(talker.activation), linear_fc2=outer))
