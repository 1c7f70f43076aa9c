"""Base of causal codecs: a transformer over embedded frames, then convolutions up to the samples.

Layers have the published names.
"""

from abc import abstractmethod
from collections import ChainMap
from dataclasses import dataclass, fields
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import nn

from services.code2wav.causal import Carry, CausalDecoder
from services.code2wav.family import DecoderSpec
from services.code2wav.layers import CausalConv, CausalTransposedConv, ConvNeXtBlock, DecoderBlock, SnakeBeta
from services.code2wav.transformer import CodecTransformer, SlidingWindowAttention, TransformerSizes


@dataclass(frozen=True)
class WaveSizes:
    """Sizes of one checkpoint's decoder.

    Attributes:
        upsampling_ratios: of the first convolutions.
        upsample_rates: of the blocks.
        decoder_dim: width of the first block's input.
        projected_from: width around the transformer, if it differs.
    """

    codebook_size: int
    num_code_groups: int
    transformer: TransformerSizes
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]
    decoder_dim: int
    projected_from: int = 0

    @property
    def samples_per_frame(self) -> int:
        return prod(self.upsampling_ratios) * prod(self.upsample_rates)

    @property
    def latent(self) -> int:
        """Width before and after the transformer."""
        return self.projected_from or self.transformer.hidden_size

    @property
    def left_trims(self) -> tuple[int, ...]:
        """For each block, the samples before the first real one.

        The reference trims a transposed convolution of kernel 2r and stride r by r on both sides. On the left this
        delays the stream by r samples, which later blocks stretch.
        """
        return tuple(accumulate(self.upsample_rates, lambda lead, rate: (lead + 1) * rate, initial=0))[1:]


def read_sizes(part: dict[str, Any], name: str) -> WaveSizes:
    """The sizes in `part` of a config.json. Raises ValueError, which calls it `name`: a key is missing or not
    supported."""
    rope: dict[str, Any] = part.get("rope_parameters") or part.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{name}: rope_type {rope['rope_type']} is not supported, only default")
    if not part.get("upsample_rates"):
        raise ValueError(f"{name}.upsample_rates is missing or empty")
    codebook_size, groups = part["codebook_size"], part["num_quantizers"]
    head_dim = part.get("head_dim") or part["hidden_size"] // part["num_attention_heads"]
    stated = ChainMap({**rope, "head_dim": head_dim}, part)
    return WaveSizes(
        codebook_size=codebook_size,
        num_code_groups=groups,
        transformer=TransformerSizes(**{size.name: stated[size.name] for size in fields(TransformerSizes)}),
        upsampling_ratios=tuple(part["upsampling_ratios"]),
        upsample_rates=tuple(part["upsample_rates"]),
        decoder_dim=part["decoder_dim"],
        projected_from=part.get("latent_dim", 0),
    )


class WaveDecoder(CausalDecoder):
    """The decoder without the embedding of codes. `spec.trimmed_samples` is 0 or the last of `sizes.left_trims`."""

    def __init__(self, spec: DecoderSpec, sizes: WaveSizes) -> None:
        super().__init__(spec, sizes.transformer.sliding_window)
        self._code_offsets: torch.Tensor
        offsets = torch.arange(sizes.num_code_groups) * sizes.codebook_size
        self.register_buffer("_code_offsets", offsets, persistent=False)
        self._rates = sizes.upsample_rates
        self._left_trims = sizes.left_trims if spec.trimmed_samples else (0,) * len(self._rates)
        latent = sizes.latent
        self.pre_transformer = CodecTransformer(sizes.transformer, self.layout, sizes.projected_from)
        self.upsample = nn.ModuleList(
            nn.ModuleList(
                [
                    CausalTransposedConv(latent, latent, ratio, ratio, self.layout),
                    ConvNeXtBlock(latent, self.layout),
                ]
            )
            for ratio in sizes.upsampling_ratios
        )
        widths = [sizes.decoder_dim // 2**i for i in range(len(self._rates) + 1)]
        self.decoder = nn.ModuleList(
            [
                CausalConv(latent, widths[0], 7, self.layout),
                *(DecoderBlock(width, rate, self.layout) for width, rate in zip(widths, self._rates, strict=False)),
                SnakeBeta(widths[-1]),
                CausalConv(widths[-1], 1, 7, self.layout),
            ]
        )

    def table_rows(self, codes: torch.Tensor) -> torch.Tensor:
        """Rows of codes (..., groups) in a table of all codebooks in order."""
        return codes + self._code_offsets

    @abstractmethod
    def embed(self, codes: torch.Tensor, carry: Carry) -> torch.Tensor:
        """The transformer's input of codes (streams, frames, groups): (streams, frames, latent)."""

    def precompute(self) -> None:
        for module in self.modules():
            if isinstance(module, SnakeBeta | CausalTransposedConv | SlidingWindowAttention):
                module.precompute()

    def forward(
        self, codes: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, at_start: bool, settled: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        frames = codes.shape[1]
        carry = self.layout.of(rows)
        x = self.pre_transformer(self.embed(codes, carry), positions, carry, settled).transpose(1, 2)
        upsample: Any = self.upsample
        for transposed, convnext in upsample:
            x = convnext(transposed(x, carry), carry)
        first, *blocks, activation, last = self.decoder
        x = first(x, carry)
        for block, rate, lead in zip(blocks, self._rates, self._left_trims, strict=True):
            x = block(x, carry, _started(x, rate, lead, positions, frames) if at_start and lead else None)
        return last(activation(x), carry).clamp(min=-1, max=1)[:, 0], carry.rows()


def _started(x: torch.Tensor, rate: int, lead: int, positions: torch.Tensor, frames: int) -> torch.Tensor:
    """Mask of a block's output, (streams, 1, samples): 0 for a stream's first `lead` samples, else 1.

    `x` is the block's input, (streams, channels, n); `positions` are the frames of each stream before.
    """
    per_frame = x.shape[-1] * rate // frames
    samples = torch.arange(min(lead, frames * per_frame), device=x.device)
    return (positions[:, None, None] * per_frame + samples >= lead).to(x.dtype)
