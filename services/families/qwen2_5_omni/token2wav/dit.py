"""The transformer that gives the flow of a noisy mel spectrogram, from codes and voice.

Blocks of mel frames of any windows and streams are rows of one batch. Every evaluation runs with and without the
condition. Parameter names are published.
"""

from math import log
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from services.common.engine.ecapa import SpeakerEncoder
from services.families.qwen2_5_omni.token2wav.blocks import Neighbours
from services.families.qwen2_5_omni.token2wav.sizes import DitSizes

_TIME_SCALE, _TIME_WIDTH, _LONGEST_PERIOD = 1000.0, 256, 10_000
_EPS = 1e-6


class BlockAttention(nn.Module):
    """Attention within a block, in some layers also to a neighbour. Only the first head has positions."""

    def __init__(self, sizes: DitSizes, layer: int) -> None:
        super().__init__()
        inner = sizes.num_attention_heads * sizes.head_dim
        self.to_q = nn.Linear(sizes.hidden_size, inner)
        self.to_k = nn.Linear(sizes.hidden_size, inner)
        self.to_v = nn.Linear(sizes.hidden_size, inner)
        self.to_out = nn.ModuleList([nn.Linear(inner, sizes.hidden_size)])
        self._heads, self._head_dim = sizes.num_attention_heads, sizes.head_dim
        back, ahead = (
            ("before",) * (layer in sizes.look_backward_layers),
            ("after",) * (layer in sizes.look_ahead_layers),
        )
        self._kinds = (*back, "own", *ahead)

    def precompute(self) -> None:
        """Joins three products into one, with the first head's rotated pairs in two halves."""
        order = torch.arange(len(self.to_q.weight))
        order[: self._head_dim] = torch.cat([order[: self._head_dim : 2], order[1 : self._head_dim : 2]])
        parts = [self.to_q, self.to_k, self.to_v]
        orders = [order, order, torch.arange(len(order))]
        self._weight = torch.cat([part.weight[o] for part, o in zip(parts, orders, strict=True)])
        self._bias = torch.cat([part.bias[o] for part, o in zip(parts, orders, strict=True)])
        del self.to_q, self.to_k, self.to_v

    def forward(self, x: torch.Tensor, neighbours: Neighbours) -> torch.Tensor:
        """(2 x blocks, block, hidden), kept; in the weights' dtype."""
        heads = self._heads
        new = F.linear(x.to(self._weight.dtype), self._weight, self._bias)
        new = new.view(*x.shape[:-1], 3 * heads, self._head_dim).transpose(1, 2)
        query, key, value = new.chunk(3, dim=1)
        query, key = (torch.cat([neighbours.rotate(each[:, 0])[:, None], each[:, 1:]], dim=1) for each in (query, key))
        y = F.scaled_dot_product_attention(
            query,
            neighbours.gathered(key, self._kinds),
            neighbours.gathered(value, self._kinds),
            attn_mask=neighbours.mask(self._kinds),
        )
        return self.to_out[0](y.transpose(1, 2).flatten(-2))


class Modulation(nn.Module):
    """Shifts, scales and gates of a layer, from the time."""

    def __init__(self, hidden: int, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, count * hidden)
        self._count = count

    def of(self, times: torch.Tensor) -> torch.Tensor:
        """(times, hidden) -> (times, count, hidden)."""
        return self.linear(F.silu(times)).unflatten(-1, (self._count, -1))


class FeedForward(nn.Module):
    def __init__(self, sizes: DitSizes) -> None:
        super().__init__()
        inner = int(sizes.hidden_size * sizes.ff_mult)
        self.ff = nn.Sequential(
            nn.Linear(sizes.hidden_size, inner),
            nn.GELU(approximate="tanh"),
            nn.Identity(),
            nn.Linear(inner, sizes.hidden_size),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden), kept; in the weights' dtype."""
        first: Any = self.ff[0]
        return self.ff(x.to(first.weight.dtype))


class DitLayer(nn.Module):
    def __init__(self, sizes: DitSizes, layer: int) -> None:
        super().__init__()
        self.attn_norm = Modulation(sizes.hidden_size, 6)
        self.attn = BlockAttention(sizes, layer)
        self.ff = FeedForward(sizes)

    def forward(self, x: torch.Tensor, modulation: torch.Tensor, neighbours: Neighbours) -> torch.Tensor:
        """(2 x blocks, block, hidden) float32, kept. `modulation`: (6, hidden) float32, of this layer and time."""
        shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation
        x = x + gate * self.attn(_normed(x, scale, shift), neighbours)
        return x + ff_gate * self.ff(_normed(x, ff_scale, ff_shift))


def _normed(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=_EPS) * (1 + scale) + shift


class _TimeEmbedding(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(_TIME_WIDTH, hidden), nn.SiLU(), nn.Linear(hidden, hidden))

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        """(times,) -> (times, hidden)."""
        half = _TIME_WIDTH // 2
        rates = torch.exp(torch.arange(half, device=times.device).float() * -(log(_LONGEST_PERIOD) / (half - 1)))
        angles = _TIME_SCALE * times[:, None] * rates
        return self.time_mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))


class Dit(nn.Module):
    """Embeddings, layers and projection.

    Args:
        times: of all evaluations, (times,) float32.
    """

    def __init__(self, sizes: DitSizes, speaker: SpeakerEncoder, times: torch.Tensor) -> None:
        super().__init__()
        self.sizes, self._at = sizes, times
        self.time_embed = _TimeEmbedding(sizes.hidden_size)
        self.text_embed = nn.ModuleDict({"codec_embed": nn.Embedding(sizes.codes, sizes.emb_dim)})
        # Of a mel frame, the speaker's vector, a code and the voice's conditioning.
        self._widths = [sizes.mel_dim, sizes.enc_dim, sizes.emb_dim, sizes.enc_emb_dim]
        self.input_embed = nn.ModuleDict(
            {"proj": nn.Linear(sum(self._widths), sizes.hidden_size), "spk_encoder": speaker}
        )
        self.transformer_blocks = nn.ModuleList(DitLayer(sizes, layer) for layer in range(sizes.num_hidden_layers))
        self.norm_out = Modulation(sizes.hidden_size, 2)
        self.proj_out = nn.Linear(sizes.hidden_size, sizes.mel_dim)

    @property
    def dtype(self) -> torch.dtype:
        """That of the layers' products and attention. Sums, norms and modulations are float32."""
        layers: Any = self.transformer_blocks
        return layers[0].ff.ff[0].weight.dtype

    def cast(self, dtype: torch.dtype) -> None:
        layers: Any = self.transformer_blocks
        for layer in layers:
            layer.attn.to(dtype)
            layer.ff.to(dtype)

    def precompute(self) -> None:
        """Computes in float32 what depends on no stream, and drops its parameters."""
        layers: Any = self.transformer_blocks
        times = self.time_embed(self._at.to(self.proj_out.weight.device))
        self._modulations = torch.stack([layer.attn_norm.of(times) for layer in layers], dim=1)
        self._out = self.norm_out.of(times)
        for layer in layers:
            layer.attn.precompute()
            del layer.attn_norm
        proj: Any = self.input_embed["proj"]
        embedding: Any = self.text_embed["codec_embed"]
        parts: tuple[torch.Tensor, ...] = torch.split(proj.weight, self._widths, dim=1)
        self._from_mel, self._from_speaker, from_code, self._from_voice = parts
        self._from_code = F.linear(embedding.weight, from_code)
        del self.time_embed, self.norm_out, self.text_embed

    def voice_rows(self, vector: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """The voice's addend of a frame, with and without the condition: (2, hidden).

        Args:
            vector: (voice,).
            reference: mel frames of the voice, (frames, bins).
        """
        embed: Any = self.input_embed
        speaker = embed["spk_encoder"](torch.stack([reference, torch.zeros_like(reference)]).transpose(1, 2))
        voice = torch.stack([vector, torch.zeros_like(vector)])
        rows = F.linear(speaker, self._from_speaker) + F.linear(voice, self._from_voice)
        return rows + embed["proj"].bias

    def condition(self, codes: torch.Tensor, voice_rows: torch.Tensor) -> torch.Tensor:
        """The addend of a window's codes (codes,), with and without the condition: (2, frames, hidden)."""
        both = self._from_code[torch.stack([codes, torch.zeros_like(codes)])]
        return (both + voice_rows[:, None]).repeat_interleave(self.sizes.repeats, dim=1)

    def forward(
        self, x: torch.Tensor, condition: torch.Tensor, neighbours: Neighbours, time: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The flow of every frame, with and without the condition: each as `x`.

        Args:
            x: (blocks, block, bins) float32.
            condition: (2, blocks, block, hidden) float32.
            time: index of a time, (1,) int64.
        """
        modulation, last = self._modulations[time][0], self._out[time][0]
        hidden = (condition + F.linear(x, self._from_mel)).flatten(0, 1)
        for i, layer in enumerate(self.transformer_blocks):
            hidden = layer(hidden, modulation[i], neighbours)
        scale, shift = last
        flow = self.proj_out(_normed(hidden, scale, shift))
        return tuple(flow.chunk(2))  # pyright: ignore[reportReturnType]
