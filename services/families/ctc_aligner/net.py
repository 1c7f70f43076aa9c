"""The net: log-mel spectrograms in, scores of letters, of begins of words and of silence out."""

import math
import unicodedata
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

RATE_HZ, HOP, WINDOW = 16_000, 160, 400  # samples
FRAME_MS = 1000 * HOP / RATE_HZ
BANDS = 40
LETTERS = "abcdefghijklmnopqrstuvwxyz'"
BLANK = 0  # of classes: no letter, or the one before goes on
CLASSES = 1 + len(LETTERS)
ANY = CLASSES  # a class that no head has: some letter, whichever
_FLOOR = 1e-6


class Heard(NamedTuple):
    """Per frame, and (batch, frames, ...): log-probabilities of `letters`, logits of `begins` and of `silence`."""

    letters: torch.Tensor
    begins: torch.Tensor
    silence: torch.Tensor


def classes_of(word: str) -> list[int]:
    """The classes of a word's letters, without accents; ANY for one that is in no other alphabet. Never empty."""
    plain = unicodedata.normalize("NFKD", word.lower().replace("’", "'"))
    found = [LETTERS.find(letter) for letter in plain if letter.isalnum() or letter == "'"]
    return [ANY if at < 0 else 1 + at for at in found] or [ANY]


class LetterNet(nn.Module):
    """Residual depthwise convolutions over frames of 10 ms.

    Args:
        width: channels.
        dilations: of each layer; a layer reads `kernel` frames that far apart.
    """

    mel: torch.Tensor

    def __init__(self, width: int, dilations: list[int], kernel: int = 7) -> None:
        super().__init__()
        self.register_buffer("mel", _mel_filters(), persistent=False)
        self.enter = nn.Conv1d(BANDS, width, 5, padding=2)
        self.layers = nn.ModuleList(_Layer(width, kernel, dilation) for dilation in dilations)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES + 2)

    def forward(self, samples: torch.Tensor, lengths: torch.Tensor) -> Heard:
        """Frames of `samples` (batch, samples) float32, of which each row has `lengths` that count.

        A row's result does not depend on the others: what is behind its end is zero in every layer.
        """
        frames = self.frames_of(lengths)
        spectrogram = self._spectrogram(samples)
        mask = (torch.arange(spectrogram.shape[-1], device=samples.device) < frames[:, None])[:, None]
        hidden = self.enter(spectrogram * mask) * mask
        for layer in self.layers:
            hidden = hidden + layer(hidden, mask)
        out = self.head(_normal(hidden, self.norm).transpose(1, 2)).float()
        return Heard(functional.log_softmax(out[..., :CLASSES], -1), out[..., CLASSES], out[..., CLASSES + 1])

    @staticmethod
    def frames_of(lengths: torch.Tensor) -> torch.Tensor:
        return lengths // HOP + 1

    def _spectrogram(self, samples: torch.Tensor) -> torch.Tensor:
        """(batch, BANDS, frames); frame i is around sample i * HOP."""
        window = torch.hann_window(WINDOW, device=samples.device)
        waves = torch.stft(samples, WINDOW, HOP, window=window, center=True, pad_mode="constant", return_complex=True)
        power = self.mel.T @ waves.abs().square()
        return (power.clamp(min=_FLOOR).log() + 4) / 4


class _Layer(nn.Module):
    def __init__(self, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.depth = nn.Conv1d(width, width, kernel, padding=kernel // 2 * dilation, dilation=dilation, groups=width)
        self.up = nn.Conv1d(width, 2 * width, 1)
        self.down = nn.Conv1d(2 * width, width, 1)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mixed = self.depth(_normal(hidden, self.norm) * mask)
        return self.down(functional.gelu(self.up(mixed))) * mask


def _normal(hidden: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    """`norm` over the channels of each frame."""
    return norm(hidden.transpose(1, 2)).transpose(1, 2)


def _mel_filters() -> torch.Tensor:
    """(bins, BANDS): triangles, evenly spaced in mel."""
    top = 2595 * math.log10(1 + RATE_HZ / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, BANDS + 2, dtype=torch.float64) / 2595) - 1)
    bins = torch.linspace(0, RATE_HZ / 2, WINDOW // 2 + 1, dtype=torch.float64)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    return torch.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)).clamp(min=0).float()
