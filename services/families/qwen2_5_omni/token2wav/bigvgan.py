"""BigVGAN (arXiv:2206.04658), stateful: mel frames in, all final samples out. Parameter names are published."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, exp, log, prod
from typing import Any, cast

import torch
from torch import nn

from services.families.qwen2_5_omni.token2wav.filters import (
    SMOOTH_REACH,
    CenteredConv,
    CenteredTransposedConv,
    Delay,
    FilterCarry,
    Layers,
    Mean,
    SmoothActivation,
    SnakeBeta,
)
from services.families.qwen2_5_omni.token2wav.sizes import fields_in

_OUTER_KERNEL = 7  # of the first convolution and the last
_EQUALLY_LONG = (("upsample_rates", "upsample_kernel_sizes"), ("resblock_kernel_sizes", "resblock_dilation_sizes"))
_LEAST_DB, _REFERENCE_DB = -115.0, 20.0


@dataclass(frozen=True)
class BigVganSizes:
    """Keys of the vocoder's config, with their defaults."""

    mel_dim: int = 80
    upsample_initial_channel: int = 1536
    resblock_kernel_sizes: Sequence[int] = (3, 7, 11)
    resblock_dilation_sizes: Sequence[Sequence[int]] = ((1, 3, 5),) * 3
    upsample_rates: Sequence[int] = (5, 3, 2, 2, 2, 2)
    upsample_kernel_sizes: Sequence[int] = (11, 7, 4, 4, 4, 4)

    @property
    def samples_per_mel(self) -> int:
        return prod(self.upsample_rates)

    @property
    def blocks(self) -> list[tuple[int, Sequence[int]]]:
        """Kernel and dilations of each residual block of a level."""
        return list(zip(self.resblock_kernel_sizes, self.resblock_dilation_sizes, strict=True))

    @property
    def delay_frames(self) -> int:
        """Mel frames that must follow one before all its samples are final."""
        outer = _OUTER_KERNEL // 2
        frames, rate = float(outer), 1
        halves = [
            sum(2 * SMOOTH_REACH + kernel // 2 * (dilation + 1) for dilation in dilations)
            for kernel, dilations in self.blocks
        ]
        for kernel, times in zip(self.upsample_kernel_sizes, self.upsample_rates, strict=True):
            rate *= times
            frames += ((kernel - times) // 2 + max(halves)) / rate
        return ceil(frames + (SMOOTH_REACH + outer) / rate)

    @classmethod
    def of(cls, config: dict[str, Any], name: str) -> "BigVganSizes":
        """Reads the sizes from `config`. Errors call it `name`.

        Raises:
            ValueError: sizes of unequal number.
        """
        sizes = cls(**fields_in(config, cls))
        for key, other in _EQUALLY_LONG:
            if len(getattr(sizes, key)) != len(getattr(sizes, other)):
                raise ValueError(f"{name}: {key} and {other} must be equally long")
        return sizes


class ResidualBlock(nn.Module):
    """Residual pairs of a dilated and a plain convolution."""

    def __init__(self, channels: int, kernel: int, dilations: Sequence[int], layers: Layers) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(CenteredConv(channels, channels, kernel, layers, d) for d in dilations)
        self.convs2 = nn.ModuleList(CenteredConv(channels, channels, kernel, layers) for _ in dilations)
        self.activations = nn.ModuleList(SmoothActivation(channels, layers) for _ in range(2 * len(dilations)))
        self._delays = [Delay(layers) for _ in dilations]

    def step(self, x: torch.Tensor, carry: FilterCarry) -> torch.Tensor:
        activations: Any = self.activations
        pairs: Any = zip(self.convs1, self.convs2, activations[::2], activations[1::2], self._delays, strict=True)
        for conv1, conv2, before1, before2, delay in pairs:
            y = conv1.step(before1.step(x, carry), carry)
            x = delay.step(x, conv2.step(before2.step(y, carry), carry), carry)
        return x


class VocoderState:
    """Of a stream: its tails, or the slot that has them and how many mel frames they are of. See `pieces`."""

    def __init__(self, layers: int) -> None:
        self.tails: list[torch.Tensor | None] = [None] * layers
        self.slot = self.frames = 0

    def shape(self) -> tuple[int, ...]:
        """Lengths of the state. Streams of equal lengths can share a pass."""
        return tuple(-1 if tail is None else tail.shape[-1] for tail in self.tails)


Part = tuple[VocoderState, torch.Tensor, bool]
"""A stream's state, its next mel frames (frames, bins), and whether these are the last."""


class BigVgan(nn.Module):
    def __init__(self, sizes: BigVganSizes) -> None:
        super().__init__()
        self.sizes = sizes
        layers = self._layers = Layers()
        widths = [sizes.upsample_initial_channel // 2**i for i in range(len(sizes.upsample_rates) + 1)]
        self.conv_pre = CenteredConv(sizes.mel_dim, widths[0], _OUTER_KERNEL, layers)
        self.ups = nn.ModuleList(
            nn.ModuleList([CenteredTransposedConv(width, width // 2, kernel, rate, layers)])
            for width, kernel, rate in zip(widths, sizes.upsample_kernel_sizes, sizes.upsample_rates, strict=False)
        )
        self.resblocks = nn.ModuleList(
            ResidualBlock(width, kernel, dilations, layers)
            for width, (kernel, dilations) in product(widths[1:], sizes.blocks)
        )
        self._means = [Mean(len(sizes.blocks), layers) for _ in sizes.upsample_rates]
        self.activation_post = SmoothActivation(widths[-1], layers)
        self.conv_post = CenteredConv(widths[-1], 1, _OUTER_KERNEL, layers, bias=False)

    def precompute(self) -> None:
        for activation in self.modules():
            if isinstance(activation, SnakeBeta):
                activation.precompute()

    def new_state(self) -> VocoderState:
        return VocoderState(self._layers.count)

    @property
    def bytes_per_state(self) -> int:
        """Approximate size of a stream's state, at most."""
        convs = [m for m in self.modules() if isinstance(m, CenteredConv | CenteredTransposedConv)]
        reach = sum(m.in_channels * (m.kernel_size[0] - 1) * m.dilation[0] for m in convs)
        # The delays around a block are as long again. An activation keeps 5 inputs, and 11 at twice the rate.
        smooth = sum(16 * len(m.act.alpha) for m in self.modules() if isinstance(m, SmoothActivation))
        return 4 * (2 * reach + smooth)

    @property
    def device(self) -> torch.device:
        return self.conv_pre.weight.device

    def sound(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """The next final samples of some streams, (n,) each, -1 to 1. Updates their states."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for i, (sound, mel, last) in enumerate(parts):
            groups[sound.shape(), len(mel), last].append(i)
        outputs = [torch.empty(0)] * len(parts)
        for members in groups.values():
            sounds = [parts[i][0] for i in members]
            tails = [_stacked(each) for each in zip(*(sound.tails for sound in sounds), strict=True)]
            carry = FilterCarry(tails, last=parts[members[0]][2])
            samples = self.step(torch.stack([parts[i][1] for i in members]).transpose(1, 2), carry)
            for row, (i, sound) in enumerate(zip(members, sounds, strict=True)):
                outputs[i] = samples[row]
                # A view would keep the tails of all streams of the pass.
                sound.tails = [None if tail is None else tail[row].clone() for tail in carry.tails]
        return outputs

    def step(self, mel: torch.Tensor, carry: FilterCarry) -> torch.Tensor:
        """(streams, bins, frames) -> (streams, samples)."""
        x = self.conv_pre.step(_decibels(mel), carry)
        ups: Any = self.ups
        blocks, count = cast("list[ResidualBlock]", list(self.resblocks)), len(self.resblocks) // len(ups)
        for level, ((up,), mean) in enumerate(zip(ups, self._means, strict=True)):
            x = up.step(x, carry)
            x = mean.step([block.step(x, carry) for block in blocks[level * count : (level + 1) * count]], carry)
        x = self.conv_post.step(self.activation_post.step(x, carry), carry)
        return x.clamp(-1, 1)[:, 0]


def _stacked(tails: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    return torch.stack([tail for tail in tails if tail is not None]) if tails[0] is not None else None


def _decibels(mel: torch.Tensor) -> torch.Tensor:
    """Converts log amplitudes to decibels, scaled to -1 to 1."""
    decibels = 20 * torch.log10(mel.exp().clamp(min=exp(_LEAST_DB / 20 * log(10)))) - _REFERENCE_DB
    return (2 * (decibels - _LEAST_DB) / -_LEAST_DB - 1).clamp(-1, 1)
