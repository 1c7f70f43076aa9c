"""The noise of a step's draws: `sampling.uniform`, in one kernel."""

import torch
import triton
import triton.language as tl

from services.talker.sampling import GAMMA, MIX_1, MIX_2

_GAMMA, _MIX_1, _MIX_2 = (tl.constexpr(number % 2**64) for number in (GAMMA, MIX_1, MIX_2))


@torch.library.custom_op("quartet::uniform", mutates_args=())
def uniform(seeds: torch.Tensor, frames: torch.Tensor, groups: int) -> torch.Tensor:
    """As `sampling.uniform`, of contiguous `seeds` and `frames`."""
    noise = _noise_like(seeds, groups)
    _uniform[(groups,)](seeds, frames, noise, groups, len(seeds), BLOCK=triton.next_power_of_2(len(seeds)))
    return noise


@uniform.register_fake
def _(seeds, frames, groups):
    return _noise_like(seeds, groups)


def _noise_like(seeds: torch.Tensor, groups: int) -> torch.Tensor:
    return seeds.new_empty(groups, len(seeds), dtype=torch.float32)


@triton.jit
def _uniform(seeds, frames, noise, groups, rows, BLOCK: tl.constexpr):
    group, row = tl.program_id(0), tl.arange(0, BLOCK)
    inside = row < rows
    seed = tl.load(seeds + row, mask=inside, other=0).to(tl.uint64)
    counter = (tl.load(frames + row, mask=inside, other=0) * groups + group + 1).to(tl.uint64)
    mixed = _mix(_mix(seed + _GAMMA) + counter * _GAMMA)
    drawn = (mixed >> 40).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)
    tl.store(noise + group * rows + row, drawn, mask=inside)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)
