"""Qwen3-Omni's codec decoder: a mean of code embeddings, a transformer and causal convolutions up to the samples.

Its layers are counterparts of those of transformers' Qwen3OmniMoeCode2Wav, with the same parameter names.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from services.code2wav.causal import CausalDecoder
from services.code2wav.family import DecoderSpec
from services.code2wav.layers import CausalConv, CausalTransposedConv, ConvNeXtBlock, DecoderBlock, SnakeBeta
from services.code2wav.transformer import Attention, Transformer, TransformerSizes

# Codec frames a second (Qwen3-Omni Technical Report, arXiv:2509.17765). The published config.json states neither this
# nor a sample rate.
FRAMES_PER_SECOND = 12.5
_PREFIX = "code2wav."


def parameter_of(tensor: str) -> str | None:
    """See `services.code2wav.family.DecoderFamily`."""
    return tensor.removeprefix(_PREFIX) if tensor.startswith(_PREFIX) else None


def new_decoder(config: dict[str, Any]) -> "Qwen3OmniDecoder":
    """See `services.code2wav.family.DecoderFamily`."""
    return Qwen3OmniDecoder(read_sizes(config))


@dataclass(frozen=True)
class DecoderSizes:
    """The decoder of one checkpoint. Sizes are in channels unless said otherwise."""

    codebook_size: int
    num_code_groups: int
    transformer: TransformerSizes
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]
    decoder_dim: int
    stated_sample_rate_hz: int | None
    """Sample rate that the checkpoint states, if it does."""

    @property
    def leads(self) -> tuple[int, ...]:
        """For each decoder block, how many samples before the first real one it makes.

        A transposed convolution of kernel 2r and stride r is trimmed by r on both sides. On the right that is what
        later input would still change. On the left it delays the stream by r samples, which later blocks stretch.
        """
        return tuple(accumulate(self.upsample_rates, lambda lead, rate: (lead + 1) * rate, initial=0))[1:]

    @property
    def spec(self) -> DecoderSpec:
        """What the engine must know. Where the checkpoint states no sample rate, the frame rate gives it."""
        samples_per_frame = math.prod(self.upsampling_ratios) * math.prod(self.upsample_rates)
        return DecoderSpec(
            sample_rate_hz=self.stated_sample_rate_hz or round(samples_per_frame * FRAMES_PER_SECOND),
            samples_per_frame=samples_per_frame,
            codebook_sizes=(self.codebook_size,) * self.num_code_groups,
            trimmed_samples=self.leads[-1],
        )


def read_sizes(config: dict[str, Any]) -> DecoderSizes:
    """The decoder that config.json describes.

    Raises:
        ValueError: the checkpoint has no code2wav, or one of a kind that does not run here.
    """
    part = config.get("code2wav_config")
    if part is None or not config.get("enable_audio_output", True):
        raise ValueError(f"the checkpoint has no code2wav (model type {config.get('model_type')})")
    rope: dict[str, Any] = part.get("rope_parameters") or part.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"code2wav_config: rope_type {rope['rope_type']} is not supported, only default")
    if not part.get("upsample_rates"):
        raise ValueError("code2wav_config.upsample_rates is missing or empty")
    try:
        return DecoderSizes(
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
            stated_sample_rate_hz=part.get("output_sample_rate") or part.get("sampling_rate"),
        )
    except KeyError as error:
        raise ValueError(f"code2wav_config.{error.args[0]} is missing") from None


class Qwen3OmniDecoder(CausalDecoder):
    """The decoder. See `CausalDecoder`."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__(sizes.spec, sizes.transformer.window)
        self.sizes = sizes
        hidden = sizes.transformer.hidden
        self.code_embedding = nn.Embedding(sizes.codebook_size * sizes.num_code_groups, hidden)
        self.pre_transformer = Transformer(sizes.transformer, self.layout)
        self.upsample = nn.ModuleList(
            nn.ModuleList(
                [
                    CausalTransposedConv(hidden, hidden, ratio, ratio, self.layout),
                    ConvNeXtBlock(hidden, self.layout),
                ]
            )
            for ratio in sizes.upsampling_ratios
        )
        rates = sizes.upsample_rates
        widths = [sizes.decoder_dim // 2**i for i in range(len(rates) + 1)]
        self.decoder = nn.ModuleList(
            [
                CausalConv(hidden, widths[0], 7, self.layout),
                *(DecoderBlock(width, rate, self.layout) for width, rate in zip(widths, rates, strict=False)),
                SnakeBeta(widths[-1]),
                CausalConv(widths[-1], 1, 7, self.layout),
            ]
        )
        self._code_offsets: torch.Tensor
        offsets = torch.arange(sizes.num_code_groups) * sizes.codebook_size
        self.register_buffer("_code_offsets", offsets, persistent=False)

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
        x = self.code_embedding(codes + self._code_offsets).mean(2)
        x = self.pre_transformer(x, positions, carry, settled).transpose(1, 2)
        upsample: Any = self.upsample
        for transposed, convnext in upsample:
            x = convnext(transposed(x, carry), carry)
        first, *blocks, activation, last = self.decoder
        x = first(x, carry)
        for block, rate, lead in zip(blocks, self.sizes.upsample_rates, self.sizes.leads, strict=True):
            x = block(x, carry, _started(x, rate, lead, positions, frames) if at_start else None)
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
