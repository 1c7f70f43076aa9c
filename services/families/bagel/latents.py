"""Latents of pictures as tokens, and the time of a denoising step."""

import math

import torch
from torch import Tensor, nn

PATCH = 2
"""Latents a token, along a side."""
_FREQUENCIES = 128
_LONGEST_PERIOD = 10_000


class LatentStates(nn.Module):
    """Embeddings of tokens of latents."""

    def __init__(self, hidden: int, channels: int, side: int) -> None:
        super().__init__()
        self.vae2llm = nn.Linear(PATCH * PATCH * channels, hidden)
        self.time_embedder = nn.Sequential(nn.Linear(2 * _FREQUENCIES, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.pos_embed = nn.Parameter(torch.zeros(side * side, hidden), requires_grad=False)

    def forward(self, tokens: Tensor, grid: Tensor, timestep: Tensor) -> Tensor:
        """(rows, tokens, hidden).

        Args:
            tokens: (rows, tokens, PATCH * PATCH * channels), of the weights' dtype.
            grid: (rows, tokens), as `grid_of` says.
            timestep: (rows,), float32, from 1, noise, to 0.
        """
        steps = torch.arange(_FREQUENCIES, dtype=torch.float32, device=timestep.device)
        frequencies = torch.exp(-math.log(_LONGEST_PERIOD) * steps / _FREQUENCIES)
        waves = timestep[:, None].float() * frequencies
        timed = self.time_embedder(torch.cat([waves.cos(), waves.sin()], dim=-1).to(tokens.dtype))
        return self.vae2llm(tokens) + timed[:, None] + self.pos_embed[grid]


def grid_of(rows: int, columns: int, side: int) -> Tensor:
    """Places of tokens, row by row, in a table of embeddings with `side` a row: (rows * columns,), int64."""
    return (torch.arange(rows)[:, None] * side + torch.arange(columns)).flatten()


def to_tokens(image: Tensor, side: int) -> Tensor:
    """Squares of (channels, height, width), row by row: (squares, side * side * channels)."""
    channels, height, width = image.shape
    squares = image.reshape(channels, height // side, side, width // side, side)
    return squares.permute(1, 3, 2, 4, 0).reshape(-1, side * side * channels)


def from_tokens(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse for PATCH: latents (1, channels, PATCH * rows, PATCH * columns) of (1, rows * columns, width)."""
    squares = tokens[0].reshape(rows, columns, PATCH, PATCH, -1).permute(4, 0, 2, 1, 3)
    return squares.reshape(1, -1, rows * PATCH, columns * PATCH)
