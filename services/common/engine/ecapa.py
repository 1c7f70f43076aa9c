"""Who speaks, as a vector: ECAPA-TDNN (arXiv:2005.07143) on a log mel spectrogram, with the published parameter names.
Tensors are (sounds, channels, mel frames).
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn


def _conv(inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> nn.Conv1d:
    """A convolution that keeps the length of its input, mirrored at both ends."""
    return nn.Conv1d(inputs, outputs, kernel, dilation=dilation, padding="same", padding_mode="reflect")


class TimeDelay(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = _conv(inputs, outputs, kernel, dilation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).relu()


class Res2Net(nn.Module):
    """Groups of channels; each sees the one before it convolved. arXiv:1904.01169."""

    def __init__(self, channels: int, groups: int, kernel: int, dilation: int) -> None:
        super().__init__()
        width = channels // groups
        self.blocks = nn.ModuleList(TimeDelay(width, width, kernel, dilation) for _ in range(groups - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = x.chunk(len(self.blocks) + 1, dim=1)
        outputs = [first]
        for i, (block, part) in enumerate(zip(self.blocks, others, strict=True)):
            outputs.append(block(part + outputs[-1] if i else part))
        return torch.cat(outputs, dim=1)


class SqueezeExcitation(nn.Module):
    """A weight for each channel by the means of all. arXiv:1709.01507."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _conv(channels, inner), _conv(inner, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.conv2(self.conv1(x.mean(2, keepdim=True)).relu()).sigmoid()


class SpeakerBlock(nn.Module):
    """Time delay, Res2Net, time delay, squeeze and excitation, with a residual."""

    def __init__(self, channels: int, groups: int, inner: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.tdnn1, self.tdnn2 = TimeDelay(channels, channels), TimeDelay(channels, channels)
        self.res2net_block = Res2Net(channels, groups, kernel, dilation)
        self.se_block = SqueezeExcitation(channels, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))


class AttentivePooling(nn.Module):
    """Attention-weighted means and deviations of channels over time: (sounds, 2 x channels, 1)."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.tdnn, self.conv = TimeDelay(3 * channels, inner), _conv(inner, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        even = torch.full_like(x[:, :1], 1 / x.shape[2])
        context = torch.cat([x, *(moment.expand_as(x) for moment in _moments(x, even))], dim=1)
        return torch.cat(_moments(x, self.conv(self.tdnn(context).tanh()).softmax(2)), dim=1)


def _moments(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean and deviation of each channel, (sounds, channels, 1) each."""
    mean = (weights * x).sum(2, keepdim=True)
    return mean, (weights * (x - mean).square()).sum(2, keepdim=True).clamp(min=1e-12).sqrt()


class SpeakerEncoder(nn.Module):
    """A mel spectrogram to a vector.

    Args:
        config: channels, kernels and dilations of the first layer, of each block, and of the layer that joins their
            outputs; and other widths.
        name: of `config` in a checkpoint's config.json.

    Raises:
        ValueError: a key is missing, or widths do not fit each other.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        super().__init__()
        try:
            self.mel_bins = cast("int", config["mel_dim"])
            channels, kernels, dilations = (config[f"enc_{key}"] for key in ("channels", "kernel_sizes", "dilations"))
            groups, squeezed = config["enc_res2net_scale"], config["enc_se_channels"]
            attended, outputs = config["enc_attention_channels"], config["enc_dim"]
        except KeyError as error:
            raise ValueError(f"{name}.{error.args[0]} is missing") from None
        first, *blocks, joined = channels
        if set(blocks) != {first} or joined != sum(blocks):
            raise ValueError(f"{name}.enc_channels {channels} must be equal ones and, last, their sum")
        layers: list[nn.Module] = [TimeDelay(self.mel_bins, first, kernels[0], dilations[0])]
        for width, kernel, dilation in list(zip(channels, kernels, dilations, strict=True))[1:-1]:
            layers.append(SpeakerBlock(width, groups, squeezed, kernel, dilation))
        self.blocks = nn.ModuleList(layers)
        self.mfa = TimeDelay(joined, joined, kernels[-1], dilations[-1])
        self.asp = AttentivePooling(joined, attended)
        self.fc = _conv(2 * joined, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(sounds, mel bins, mel frames) -> (sounds, outputs)."""
        first, *blocks = self.blocks
        x = first(x)
        outputs: list[torch.Tensor] = []
        for block in blocks:
            x = block(x)
            outputs.append(x)
        return self.fc(self.asp(self.mfa(torch.cat(outputs, dim=1))))[..., 0]
