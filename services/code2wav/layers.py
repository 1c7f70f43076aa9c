"""Stateful convolutional layers of a codec: the output does not depend on how the input is split.

Tensors are (streams, channels, samples).
"""

import torch
from torch import nn
from torch.nn import functional as F

from services.code2wav.causal import Carry, StateLayout

# torch runs smaller inputs in its own loops, which take 3 to 5 times as long as one matrix product over the unfolded
# input. It runs larger ones by oneDNN, which takes half as long as the product (measured on AVX-512).
_ONEDNN_FROM = 20480


def _product(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """weight (outputs, inputs) times x (streams, inputs, n), plus bias (outputs, 1): (streams, outputs, n)."""
    if len(x) == 1:
        return torch.addmm(bias, weight, x[0])[None]
    return torch.baddbmm(bias, weight.expand(len(x), -1, -1), x)


class CausalConv(nn.Module):
    """Convolution whose left padding is the end of the previous input."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, layout: StateLayout, dilation: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, groups=groups)
        self._tail = (kernel - 1) * dilation
        self._piece = layout.add((inputs, self._tail)) if self._tail else None

    def forward(self, x: torch.Tensor, carry: Carry) -> torch.Tensor:
        """(streams, inputs, n) -> (streams, outputs, n)."""
        if self._piece is None:
            return self._pointwise(x)
        x = torch.cat([carry.take(self._piece), x], dim=-1)
        carry.keep(self._piece, x[..., -self._tail :])
        if x.device.type == "cpu" and x.numel() <= _ONEDNN_FROM:
            return self._unfolded(x)
        return self.conv(x)

    def _pointwise(self, x: torch.Tensor) -> torch.Tensor:
        """Accepts x of any strides."""
        if x.device.type == "cpu":
            weight, bias = self.conv.weight[..., 0], self.conv.bias
            assert bias is not None
            return _product(weight, x, bias[:, None])
        return self.conv(x)

    def _unfolded(self, x: torch.Tensor) -> torch.Tensor:
        """The same for contiguous x, (streams, inputs, tail + n), as a matrix product or a weighted sum."""
        streams, inputs, length = x.shape
        (dilation,), (kernel,), groups = self.conv.dilation, self.conv.kernel_size, self.conv.groups
        n, weight, bias = length - self._tail, self.conv.weight, self.conv.bias
        assert bias is not None
        taps = x.as_strided((streams, inputs, kernel, n), (inputs * length, length, dilation, 1))
        if groups > 1:  # depthwise
            return (taps * weight[:, 0, :, None]).sum(2) + bias[:, None]
        taps, weight = taps.reshape(streams, inputs * kernel, n), weight.flatten(1)
        return _product(weight, taps, bias[:, None])


class CausalTransposedConv(nn.Module):
    """Transposed convolution, as one matrix product, that returns the samples which no later input changes.

    It keeps the samples that the reference trims on the left, so that streams keep equal lengths: see `DecoderBlock`.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, layout: StateLayout) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride=stride)
        self._stride, self._outputs = stride, outputs
        self._taps = kernel // stride  # every kernel here is a multiple of its stride
        self._piece = layout.add((inputs, self._taps - 1)) if self._taps > 1 else None

    def precompute(self) -> None:
        weight = self.conv.weight.unflatten(2, (self._taps, self._stride)).flip(2)  # the oldest input first
        self._weight = weight.permute(1, 3, 2, 0).flatten(0, 1).flatten(1).contiguous()
        assert self.conv.bias is not None
        self._bias = self.conv.bias.repeat_interleave(self._stride)[:, None]

    def forward(self, x: torch.Tensor, carry: Carry) -> torch.Tensor:
        """(streams, inputs, n) -> (streams, outputs, n * stride)."""
        streams, _, n = x.shape
        if self._piece is not None:
            x = torch.cat([carry.take(self._piece), x], dim=-1)
            carry.keep(self._piece, x[..., n:])
            x = torch.cat([x[..., i : i + n] for i in range(self._taps)], dim=1)
        y = _product(self._weight, x, self._bias)
        return y.view(streams, self._outputs, self._stride, n).transpose(2, 3).flatten(2)


class SnakeBeta(nn.Module):
    """x + sin(x e^alpha)^2 / e^beta, per channel. arXiv:2006.08195."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def precompute(self) -> None:
        self._frequency = self.alpha.exp()[:, None]
        self._height = 1.0 / (self.beta.exp() + 1e-9)[:, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., channels, samples), kept."""
        return torch.addcmul(x, (x * self._frequency).sin_().square_(), self._height)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution and a two-layer perceptron per sample, with a residual. arXiv:2201.03545."""

    def __init__(self, channels: int, layout: StateLayout) -> None:
        super().__init__()
        self.dwconv = CausalConv(channels, channels, 7, layout, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor, carry: Carry) -> torch.Tensor:
        """(streams, channels, n), kept."""
        y = self.norm(self.dwconv(x, carry).transpose(1, 2))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + y.transpose(1, 2)


class ResidualUnit(nn.Module):
    """Dilated and pointwise convolution with a residual."""

    def __init__(self, channels: int, dilation: int, layout: StateLayout) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv(channels, channels, 7, layout, dilation=dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = CausalConv(channels, channels, 1, layout)

    def forward(self, x: torch.Tensor, carry: Carry) -> torch.Tensor:
        """(streams, channels, n), kept."""
        return self.conv2(self.act2(self.conv1(self.act1(x), carry)), carry).add_(x)


class DecoderBlock(nn.Module):
    """Upsamples by `rate` and halves the channels."""

    def __init__(self, inputs: int, rate: int, layout: StateLayout) -> None:
        super().__init__()
        outputs = inputs // 2
        self.block = nn.ModuleList(
            [
                SnakeBeta(inputs),
                CausalTransposedConv(inputs, outputs, 2 * rate, rate, layout),
                *(ResidualUnit(outputs, dilation, layout) for dilation in (1, 3, 9)),
            ]
        )

    def forward(self, x: torch.Tensor, carry: Carry, started: torch.Tensor | None) -> torch.Tensor:
        """(streams, inputs, n) -> (streams, inputs // 2, n * rate).

        `started` is (streams, 1, m), m <= n * rate: 0 for samples that the reference trims on the left, which become
        zeros like left padding, else 1.
        """
        activation, upsample, *units = self.block
        x = upsample(activation(x), carry)
        for unit in units:
            if started is not None:
                x[..., : started.shape[-1]] *= started
            x = unit(x, carry)
        if started is not None:
            x[..., : started.shape[-1]] *= started
        return x
