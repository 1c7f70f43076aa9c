"""Masks of attention."""

import torch


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where the bool `seen` is true, else -inf. Of a bool mask, torch makes this at every call: two kernels."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
