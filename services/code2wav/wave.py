"""What causal codecs have in common: a transformer over embedded frames, and convolutions up to the samples.

Its layers have the parameter names that published checkpoints use. How a frame's codes are embedded is the family's.
"""

from abc import abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import nn

from services.code2wav.causal import Carry, CausalDecoder
from services.code2wav.family import DecoderSpec
from services.code2wav.layers import CausalConv, CausalTransposedConv, ConvNeXtBlock, DecoderBlock, SnakeBeta
from services.code2wav.transformer import Attention, Transformer, TransformerSizes


@dataclass(frozen=True)
class WaveSizes:
    """The decoder of one checkpoint. Sizes are in channels unless said otherwise.

    Attributes:
        projected_from: width on both sides of the transformer, which projects it; 0: that of the transformer.
        upsampling_ratios: frames that each of the first convolutions makes of one.
        upsample_rates: samples that each block makes of one.
        decoder_dim: of the first block's input.
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
        """Samples that a frame stands for."""
        return prod(self.upsampling_ratios) * prod(self.upsample_rates)

    @property
    def latent(self) -> int:
        """Width before and after the transformer."""
        return self.projected_from or self.transformer.hidden

    @property
    def left_trims(self) -> tuple[int, ...]:
        """For each block, how many samples before the first real one it makes, where the reference trims both sides.

        A transposed convolution of kernel 2r and stride r is trimmed by r on both sides. On the right that is what
        later input would still change. On the left it delays the stream by r samples, which later blocks stretch.
        """
        return tuple(accumulate(self.upsample_rates, lambda lead, rate: (lead + 1) * rate, initial=0))[1:]


def read_sizes(part: dict[str, Any], name: str) -> WaveSizes:
    """The decoder that `part` of a config.json describes, which is called `name` there.

    Raises:
        ValueError: a key is missing, or of a kind that does not run here.
    """
    rope: dict[str, Any] = part.get("rope_parameters") or part.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{name}: rope_type {rope['rope_type']} is not supported, only default")
    if not part.get("upsample_rates"):
        raise ValueError(f"{name}.upsample_rates is missing or empty")
    try:
        return WaveSizes(
            codebook_size=part["codebook_size"],
            num_code_groups=part["num_quantizers"],
            transformer=TransformerSizes(
                hidden=part["hidden_size"],
                layers=part["num_hidden_layers"],
                heads=part["num_attention_heads"],
                kv_heads=part["num_key_value_heads"],
                head_dim=part.get("head_dim") or part["hidden_size"] // part["num_attention_heads"],
                intermediate=part["intermediate_size"],
                attention_bias=part["attention_bias"],
                activation=part["hidden_act"],
                norm_eps=part["rms_norm_eps"],
                rope_theta=rope["rope_theta"] if "rope_theta" in rope else part["rope_theta"],
                window=part["sliding_window"],
            ),
            upsampling_ratios=tuple(part["upsampling_ratios"]),
            upsample_rates=tuple(part["upsample_rates"]),
            decoder_dim=part["decoder_dim"],
            projected_from=part.get("latent_dim", 0),
        )
    except KeyError as error:
        raise ValueError(f"{name}.{error.args[0]} is missing") from None


class WaveDecoder(CausalDecoder):
    """The decoder, but for the embedding of codes. See `CausalDecoder`.

    Args:
        spec: whose trimmed samples are 0, or the last of the sizes' `left_trims`.
    """

    def __init__(self, spec: DecoderSpec, sizes: WaveSizes) -> None:
        super().__init__(spec, sizes.transformer.window)
        self._code_offsets: torch.Tensor
        offsets = torch.arange(sizes.num_code_groups) * sizes.codebook_size
        self.register_buffer("_code_offsets", offsets, persistent=False)
        self._rates = sizes.upsample_rates
        self._left_trims = sizes.left_trims if spec.trimmed_samples else (0,) * len(self._rates)
        latent = sizes.latent
        self.pre_transformer = Transformer(sizes.transformer, self.layout, sizes.projected_from)
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
        """Rows of codes (..., groups) in a table that has all codebooks, one after the other."""
        return codes + self._code_offsets

    @abstractmethod
    def embed(self, codes: torch.Tensor, carry: Carry) -> torch.Tensor:
        """The transformer's input of codes (streams, frames, groups): (streams, frames, latent)."""

    def precompute(self) -> None:
        """As `Decoder.precompute`."""
        for module in self.modules():
            if isinstance(module, SnakeBeta | CausalTransposedConv | Attention):
                module.precompute()

    def forward(
        self, codes: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, at_start: bool, settled: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `CausalDecoder.forward`."""
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
    """Where a block's output has begun: (streams, 1, samples) of x's dtype, 0 up to `lead` samples from the stream's
    start, else 1. As many samples as may be 0.

    Args:
        x: the block's input, (streams, channels, n).
        positions: frames that each stream had decoded before this step of `frames`.
    """
    per_frame = x.shape[-1] * rate // frames
    samples = torch.arange(min(lead, frames * per_frame), device=x.device)
    return (positions[:, None, None] * per_frame + samples >= lead).to(x.dtype)
