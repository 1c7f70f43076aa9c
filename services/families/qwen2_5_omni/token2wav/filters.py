"""Stateful layers that see both sides of a sample. Signals are (streams, channels, samples).

The output equals the layer's on the whole signal with the reference's padding, however the signal is split. It comes
once all its inputs are there, so layers in sequence lag more and more.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

SMOOTH_REACH = 5
"""Samples on either side of an activation's output that it depends on."""
_TAPS = 12  # of each low pass
_UP_PAST = 5  # past and future inputs of an upsampled sample


class FilterCarry:
    """The layers' states before and after one pass.

    Args:
        tails: each layer's last inputs, None before its first.
        last: whether the signal ends here.
    """

    def __init__(self, tails: Sequence[torch.Tensor | None], last: bool) -> None:
        self.tails, self.last = list(tails), last

    @property
    def kept(self) -> list[torch.Tensor]:
        """The tails of layers that have begun."""
        return [tail for tail in self.tails if tail is not None]

    def has_begun(self, layer: int) -> bool:
        return self.tails[layer] is not None

    def extend(
        self,
        layer: int,
        x: torch.Tensor,
        pads: tuple[int, int] = (0, 0),
        cuts: tuple[int, int] = (0, 0),
        mode: str = "",
    ) -> torch.Tensor:
        """`x` after the layer's tail. At the signal's ends `cuts` samples are dropped, then `pads` added.

        Args:
            mode: "replicate" pads with end samples, otherwise zeros.
        """
        tail = self.tails[layer]
        if tail is None and not x.shape[-1]:
            return x
        if self.last:
            x = x[..., : x.shape[-1] - cuts[1]]
        joined = _padded(x[..., cuts[0] :], (pads[0], 0), mode) if tail is None else torch.cat([tail, x], dim=-1)
        return _padded(joined, (0, pads[1]), mode) if self.last else joined

    def keep(self, layer: int, x: torch.Tensor, used: int) -> None:
        """Keeps the result of `extend` without its first `used` samples."""
        if x.shape[-1] or self.tails[layer] is not None:
            self.tails[layer] = x[..., used:].clone()


def _padded(x: torch.Tensor, pads: tuple[int, int], mode: str) -> torch.Tensor:
    return F.pad(x, pads, mode="replicate") if mode else F.pad(x, pads)


class Layers:
    """Numbers the stateful layers."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count - 1


class CenteredConv(nn.Conv1d):
    """A convolution whose output is as long as its input, with zeros at both ends."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, layers: Layers, dilation: int = 1, bias: bool = True
    ) -> None:
        super().__init__(inputs, outputs, kernel, dilation=dilation, bias=bias)  # pyright: ignore[reportUnknownMemberType]
        self._layer, self._reach = layers.add(), (kernel - 1) * dilation

    def step(self, x: torch.Tensor, carry: FilterCarry) -> torch.Tensor:
        x = carry.extend(self._layer, x, (self._reach // 2, self._reach // 2))
        ready = max(0, x.shape[-1] - self._reach)
        carry.keep(self._layer, x, ready)
        return self(x) if ready else x.new_zeros(x.shape[0], self.out_channels, 0)


class CenteredTransposedConv(nn.ConvTranspose1d):
    """A transposed convolution by `rate`, trimmed alike at both ends.

    Raises:
        ValueError: the kernel does not fit the rate.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, rate: int, layers: Layers) -> None:
        super().__init__(inputs, outputs, kernel, rate)  # pyright: ignore[reportUnknownMemberType]
        self._trim, odd = divmod(kernel - rate, 2)
        if odd or not 0 <= self._trim < rate:
            raise ValueError(f"an upsample_kernel_sizes of {kernel} does not fit its upsample_rates of {rate}")
        self._layer, self._rate, self._past = layers.add(), rate, (kernel - 1) // rate

    def step(self, x: torch.Tensor, carry: FilterCarry) -> torch.Tensor:
        first = 0 if carry.has_begun(self._layer) else self._trim
        x = carry.extend(self._layer, x, (self._past, 1))
        ready = max(0, x.shape[-1] - self._past)
        carry.keep(self._layer, x, ready)
        if not ready:
            return x.new_zeros(x.shape[0], self.out_channels, 0)
        end = self._rate * x.shape[-1] - (self._rate - self._trim if carry.last else 0)
        return self(x)[..., self._rate * self._past + first : end]


class Delay:
    """Holds samples back until their addends come."""

    def __init__(self, layers: Layers) -> None:
        self._layer = layers.add()

    def step(self, x: torch.Tensor, added: torch.Tensor, carry: FilterCarry) -> torch.Tensor:
        x = carry.extend(self._layer, x)
        ready = added.shape[-1]
        carry.keep(self._layer, x, ready)
        return x[..., :ready] + added


class Mean:
    """The mean of signals with different lags."""

    def __init__(self, count: int, layers: Layers) -> None:
        self._layers = [layers.add() for _ in range(count)]

    def step(self, signals: Sequence[torch.Tensor], carry: FilterCarry) -> torch.Tensor:
        extended = [carry.extend(layer, x) for layer, x in zip(self._layers, signals, strict=True)]
        ready = min(x.shape[-1] for x in extended)
        for layer, x in zip(self._layers, extended, strict=True):
            carry.keep(layer, x, ready)
        total = extended[0][..., :ready]
        for x in extended[1:]:
            total = total + x[..., :ready]
        return total / len(extended)


class SnakeBeta(nn.Module):
    """x + sin(x e^alpha)^2 / e^beta, per channel. arXiv:2006.08195."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.zeros(channels))

    def precompute(self) -> None:
        self._rates, self._gains = self.alpha.exp()[:, None], 1 / (self.beta.exp()[:, None] + 1e-9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._gains * (x * self._rates).sin().square()


class SmoothActivation(nn.Module):
    """An activation at twice the sample rate, between two low passes with replicated ends. arXiv:2206.04658."""

    def __init__(self, channels: int, layers: Layers) -> None:
        super().__init__()
        self.act = SnakeBeta(channels)
        self._up, self._down = layers.add(), layers.add()
        self._low_pass: torch.Tensor
        self.register_buffer("_low_pass", low_pass()[None, None], persistent=False)

    def step(self, x: torch.Tensor, carry: FilterCarry) -> torch.Tensor:
        x = carry.extend(self._up, x, (3, 3), mode="replicate")
        ready = max(0, x.shape[-1] - _UP_PAST)
        carry.keep(self._up, x, ready)
        if ready:
            rows = x.flatten(0, 1)[:, None]
            wide = 2 * F.conv_transpose1d(rows, self._low_pass, stride=2)[..., 2 * _UP_PAST : 2 * x.shape[-1]]
            wide = self.act(wide.view(*x.shape[:-1], -1))
        else:
            wide = x.new_zeros(*x.shape[:-1], 0)
        # The first and the last sample of the upsampled signal lie outside of it.
        wide = carry.extend(self._down, wide, (_TAPS // 2 - 1, _TAPS // 2), (1, 1), "replicate")
        ready = max(0, (wide.shape[-1] - _TAPS) // 2 + 1)
        carry.keep(self._down, wide, 2 * ready)
        if not ready:
            return wide[..., :0]
        return F.conv1d(wide.flatten(0, 1)[:, None], self._low_pass, stride=2).view(*wide.shape[:-1], -1)


def low_pass() -> torch.Tensor:
    """The filter for half the sample rate: a sinc in a Kaiser window, (12,) float32, with sum 1."""
    half, transition = _TAPS // 2, 4 * 0.3
    attenuation_db = 2.285 * (half - 1) * math.pi * transition + 7.95
    beta = 0.1102 * (attenuation_db - 8.7)  # Kaiser's formula for more than 50 dB
    window = torch.kaiser_window(_TAPS, beta=beta, periodic=False, dtype=torch.float32)
    taps = 0.5 * window * torch.sinc(0.5 * (torch.arange(-half, half) + 0.5))
    return taps / taps.sum()
