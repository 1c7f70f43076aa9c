"""Sound for those who hear voices."""

import torch

RATE_HZ = 24_000


def voice_like(seconds: float) -> torch.Tensor:
    """(samples,) float32: with pitch, overtones, a rhythm and noise, so that an encoder has something to say."""
    generator = torch.Generator().manual_seed(9)
    t = torch.arange(round(seconds * RATE_HZ)) / RATE_HZ
    voiced = torch.stack([torch.sin(2 * torch.pi * 140 * k * t + k) / k for k in range(1, 12)]).sum(0)
    loudness = 0.15 * (1 + torch.sin(2 * torch.pi * 3 * t))
    return voiced * loudness + 0.01 * torch.randn(len(t), generator=generator)
