"""A Qwen2 whose layers have two sets of weights: one for texts, patches and marks, one for latents of pictures.

"Mixture of transformers", arXiv:2505.14683, section 2: attention is shared, all else is not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class MotSizes:
    """Of the transformer, with the names of llm_config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def context_width(self) -> int:
        """Of a token in a context: keys and values of all layers."""
        return self.num_hidden_layers * 2 * self.num_key_value_heads * self.head_dim


class Expert(nn.Module):
    """One of a layer's two sets of weights."""

    def __init__(self, sizes: MotSizes) -> None:
        super().__init__()
        hidden, inner, width = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
        self.head_dim = width
        self.input_layernorm = nn.RMSNorm(hidden, sizes.rms_norm_eps)
        self.q_proj = nn.Linear(hidden, sizes.num_attention_heads * width)
        self.k_proj = nn.Linear(hidden, sizes.num_key_value_heads * width)
        self.v_proj = nn.Linear(hidden, sizes.num_key_value_heads * width)
        self.o_proj = nn.Linear(sizes.num_attention_heads * width, hidden, bias=False)
        self.q_norm = nn.RMSNorm(width, sizes.rms_norm_eps)
        self.k_norm = nn.RMSNorm(width, sizes.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, sizes.rms_norm_eps)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def heads(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (rows, tokens, heads, head_dim), without rope."""
        states = self.input_layernorm(states)
        query, key, value = (
            project(states).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.q_norm(query), self.k_norm(key), value

    def feed(self, states: Tensor) -> Tensor:
        states = self.post_attention_layernorm(states)
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class MotLayer(nn.Module):
    """Both sets of weights, and the attention that they share."""

    def __init__(self, sizes: MotSizes) -> None:
        super().__init__()
        self.und, self.gen = Expert(sizes), Expert(sizes)

    def forward(
        self, states: Tensor, cos: Tensor, sin: Tensor, past: Tensor, mask: Tensor | None, latents: bool
    ) -> tuple[Tensor, Tensor]:
        """As `Mot.forward`.

        Args:
            cos, sin: (rows, tokens, head_dim / 2), float32.
            past: (rows, length, 2, key heads, head_dim), keys and values before.

        Returns:
            The states, and the tokens' own keys and values, (rows, tokens, 2, key heads, head_dim).
        """
        parts = [
            _joined(und, gen)
            for und, gen in zip(
                self.und.heads(_marks(states, latents)),
                self.gen.heads(states[:, 1:-1]) if latents else (None,) * 3,
                strict=True,
            )
        ]
        own = torch.stack([_turned(parts[1], cos, sin), parts[2]], dim=2)
        both, query = torch.cat([past, own], dim=1), _turned(parts[0], cos, sin)
        if mask is not None:  # torch's CUDA kernels take a mask, or fewer heads of keys, but not both
            both = both.repeat_interleave(query.shape[2] // both.shape[3], dim=3)
        keys, values = both.unbind(2)
        read = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            enable_gqa=mask is None,
        )
        read = read.transpose(1, 2).flatten(2)
        states = states + self._by_kind("o_proj", read, latents)
        return states + self._by_kind("feed", states, latents), own

    def _by_kind(self, part: str, states: Tensor, latents: bool) -> Tensor:
        made = getattr(self.gen, part)(states[:, 1:-1]) if latents else None
        return _joined(getattr(self.und, part)(_marks(states, latents)), made)


class Mot(nn.Module):
    """The transformer behind its embeddings."""

    def __init__(self, sizes: MotSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(MotLayer(sizes) for _ in range(sizes.num_hidden_layers))
        self.norm = nn.RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.norm_moe_gen = nn.RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def forward(
        self, states: Tensor, positions: Tensor, context: Tensor, mask: Tensor | None, latents: bool
    ) -> tuple[Tensor, Tensor]:
        """Tokens behind a context.

        Args:
            states: (rows, tokens, hidden), embeddings.
            positions: (rows, tokens), of rope.
            context: (rows, length, context_width), what is before.
            mask: bool, broadcast to (rows, 1, tokens, length + tokens): what each token sees; None: all.
            latents: whether the tokens are latents between two marks; else all are text, patches or marks.

        Returns:
            States behind the last norm, and what the tokens add to the context, (rows, tokens, context_width).
        """
        cos, sin = self._rope(positions)
        sizes = self.sizes
        past = context.reshape(
            *context.shape[:2], sizes.num_hidden_layers, 2, sizes.num_key_value_heads, sizes.head_dim
        )
        grown: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            states, own = layer(states, cos, sin, past[:, :, i], mask, latents)
            grown.append(own)
        made = self.norm_moe_gen(states[:, 1:-1]) if latents else None
        return _joined(self.norm(_marks(states, latents)), made), torch.stack(grown, dim=2).flatten(2)

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        width = self.sizes.head_dim
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
        angles = positions[..., None].float() * self.sizes.rope_theta**-exponents
        return angles.cos(), angles.sin()


def _marks(states: Tensor, latents: bool) -> Tensor:
    """The tokens that are no latents."""
    return states[:, :: states.shape[1] - 1] if latents else states


def _joined(marks: Tensor, latents: Tensor | None) -> Tensor:
    """The inverse: what is between two marks, if anything is."""
    return marks if latents is None else torch.cat([marks[:, :1], latents, marks[:, 1:]], dim=1)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on (rows, tokens, heads, head_dim), in float32."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)
