"""The transformer of code2wav, stateful: attention over a sliding window whose keys and values are carried.

Counterpart of transformers' Qwen3OmniMoeCode2WavTransformerModel, with the same parameter names. Tensors are
(streams, frames, hidden).
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from services.code2wav.layers import NewBuffer
from services.code2wav.spec import Code2WavSpec
from services.code2wav.state import Batch


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden), kept."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)).to(x.dtype)


class LayerScale(nn.Module):
    """Learnt factor per channel of a residual branch. arXiv:2103.17239."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden), kept."""
        return self.scale * x


class Step:
    """What all layers share in one step: the rotary angles and the mask of `frames` new frames a stream."""

    def __init__(self, batch: Batch, frames: int, spec: Code2WavSpec, like: torch.Tensor) -> None:
        self.batch = batch
        past = spec.window - 1
        starts = torch.tensor(batch.frames, device=like.device)[:, None]
        # Key j of a stream at frame t stands for position t - past + j: before the start there is none.
        queries = starts + torch.arange(frames, device=like.device)
        keys = starts + torch.arange(-past, frames, device=like.device)
        distance = queries[:, :, None] - keys[:, None, :]
        seen = (distance >= 0) & (distance < spec.window) & (keys >= 0)[:, None, :]
        self.mask = seen[:, None]  # (streams, 1, frames, past + frames)
        exponents = torch.arange(0, spec.head_dim, 2, device=like.device, dtype=torch.float) / spec.head_dim
        angles = queries[:, None, :, None].float() * (1.0 / spec.rope_theta**exponents)
        self.cos = torch.cat([angles, angles], dim=-1).cos().to(like.dtype)  # (streams, 1, frames, head_dim)
        self.sin = torch.cat([angles, angles], dim=-1).sin().to(like.dtype)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions for (streams, heads, frames, head_dim). arXiv:2104.09864."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin


class Attention(nn.Module):
    """Attention of each frame to the `window` frames that end with it."""

    def __init__(self, spec: Code2WavSpec, new_buffer: NewBuffer) -> None:
        super().__init__()
        queries, keys, bias = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.attention_bias
        self.q_proj = nn.Linear(spec.hidden, queries, bias=bias)
        self.k_proj = nn.Linear(spec.hidden, keys, bias=bias)
        self.v_proj = nn.Linear(spec.hidden, keys, bias=bias)
        self.o_proj = nn.Linear(queries, spec.hidden, bias=bias)
        self._head_dim = spec.head_dim
        self._past = spec.window - 1
        self._grouped = spec.heads != spec.kv_heads
        self._buffer = new_buffer((2, spec.kv_heads, self._past, spec.head_dim))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """(streams, frames, hidden), kept."""
        queries, keys, values = (
            projection(x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        new = torch.stack([step.rotate(keys), values], dim=1)
        window = torch.cat([step.batch.take(self._buffer), new], dim=-2)
        step.batch.keep(self._buffer, window[..., window.shape[-2] - self._past :, :])
        y = F.scaled_dot_product_attention(
            step.rotate(queries), window[:, 0], window[:, 1], attn_mask=step.mask, enable_gqa=self._grouped
        )
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    """Gated perceptron."""

    def __init__(self, spec: Code2WavSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden, spec.intermediate, bias=False)
        self.up_proj = nn.Linear(spec.hidden, spec.intermediate, bias=False)
        self.down_proj = nn.Linear(spec.intermediate, spec.hidden, bias=False)
        self._activation = ACT2FN[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden), kept."""
        return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))


class TransformerLayer(nn.Module):
    """Attention and perceptron, each normed before and scaled after."""

    def __init__(self, spec: Code2WavSpec, new_buffer: NewBuffer) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden, spec.norm_eps)
        self.self_attn = Attention(spec, new_buffer)
        self.self_attn_layer_scale = LayerScale(spec.hidden)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.norm_eps)
        self.mlp = Mlp(spec)
        self.mlp_layer_scale = LayerScale(spec.hidden)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """(streams, frames, hidden), kept."""
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), step))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class Transformer(nn.Module):
    """All layers and the final norm."""

    def __init__(self, spec: Code2WavSpec, new_buffer: NewBuffer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(spec, new_buffer) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.norm_eps)
        self._spec = spec

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """(streams, frames, hidden), kept."""
        step = Step(batch, x.shape[1], self._spec, x)
        for layer in self.layers:
            x = layer(x, step)
        return self.norm(x)
