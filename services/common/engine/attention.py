"""Masks of attention."""

import torch


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where the bool `seen` is true, else -inf. torch makes this of a bool mask at every call: two kernels on a GPU."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
