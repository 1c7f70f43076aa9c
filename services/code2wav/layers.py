"""The convolutional layers of code2wav, stateful: any split of the input gives what one pass over all of it gives.

Counterparts of transformers' Qwen3OmniMoeCausalConvNet, CausalTransConvNet, ConvNeXtBlock, SnakeBeta and
Code2WavDecoderBlock, with the same parameter names. Tensors are (streams, channels, samples).
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from services.code2wav.state import Batch

# Registers a buffer of a shape (without slots), returns its index.
NewBuffer = Callable[[tuple[int, ...]], int]


class CausalConv(nn.Module):
    """Convolution whose left padding is the end of what came before."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, new_buffer: NewBuffer, dilation: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, groups=groups)
        self._tail = (kernel - 1) * dilation
        self._buffer = new_buffer((inputs, self._tail)) if self._tail else None

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """(streams, inputs, n) -> (streams, outputs, n)."""
        if self._buffer is None:
            return self.conv(x)
        x = torch.cat([batch.take(self._buffer), x], dim=-1)
        batch.keep(self._buffer, x[..., -self._tail :])
        return self.conv(x)


class CausalTransposedConv(nn.Module):
    """Transposed convolution that gives out the samples which no later input changes.

    What the last inputs add to samples after those is carried, without the bias. The left trim of the reference's layer
    is not cut off here, so that streams keep equal lengths: see `Code2WavSpec.leads`.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, new_buffer: NewBuffer) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride=stride)
        self._stride = stride
        self._overhang = kernel - stride
        self._buffer = new_buffer((outputs, self._overhang)) if self._overhang else None

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """(streams, inputs, n) -> (streams, outputs, n * stride)."""
        if self._buffer is None:
            return self.conv(x)
        samples = x.shape[-1] * self._stride
        y = F.conv_transpose1d(x, self.conv.weight, stride=self._stride)
        y[..., : self._overhang] += batch.take(self._buffer)
        batch.keep(self._buffer, y[..., samples:])
        assert self.conv.bias is not None
        return y[..., :samples] + self.conv.bias[:, None]


class SnakeBeta(nn.Module):
    """x + sin(x e^alpha)^2 / e^beta, per channel. arXiv:2006.08195."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.register_buffer("_frequency", torch.ones(channels, 1), persistent=False)
        self.register_buffer("_height", torch.ones(channels, 1), persistent=False)

    def precompute(self) -> None:
        """To be called once the parameters are loaded."""
        self._frequency = self.alpha.exp()[:, None]
        self._height = 1.0 / (self.beta.exp() + 1e-9)[:, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape (..., channels, samples), kept."""
        return x + self._height * torch.sin(x * self._frequency).square()


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution and a two-layer perceptron per sample, with a residual. arXiv:2201.03545."""

    def __init__(self, channels: int, new_buffer: NewBuffer) -> None:
        super().__init__()
        self.dwconv = CausalConv(channels, channels, 7, new_buffer, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """(streams, channels, n), kept."""
        y = self.norm(self.dwconv(x, batch).transpose(1, 2))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + y.transpose(1, 2)


class ResidualUnit(nn.Module):
    """Dilated and pointwise convolution with a residual."""

    def __init__(self, channels: int, dilation: int, new_buffer: NewBuffer) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv(channels, channels, 7, new_buffer, dilation=dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = CausalConv(channels, channels, 1, new_buffer)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """(streams, channels, n), kept."""
        return x + self.conv2(self.act2(self.conv1(self.act1(x), batch)), batch)


class DecoderBlock(nn.Module):
    """Upsamples by `rate` and halves the channels."""

    def __init__(self, inputs: int, rate: int, new_buffer: NewBuffer) -> None:
        super().__init__()
        outputs = inputs // 2
        self.block = nn.ModuleList(
            [
                SnakeBeta(inputs),
                CausalTransposedConv(inputs, outputs, 2 * rate, rate, new_buffer),
                *(ResidualUnit(outputs, dilation, new_buffer) for dilation in (1, 3, 9)),
            ]
        )

    def forward(self, x: torch.Tensor, batch: Batch, started: torch.Tensor | None) -> torch.Tensor:
        """(streams, inputs, n) -> (streams, inputs // 2, n * rate).

        Args:
            started: (streams, 1, n * rate), 0 for samples that the reference trims off on the left, else 1; None if
                there are none. What follows must see zeros in their place, as its left padding.
        """
        activation, upsample, *units = self.block
        x = upsample(activation(x), batch)
        for unit in units:
            if started is not None:
                x = x * started
            x = unit(x, batch)
        return x if started is None else x * started
