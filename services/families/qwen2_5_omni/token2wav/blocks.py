"""Batches of windows as blocks of mel frames."""

from typing import NamedTuple

import torch

from services.common.engine.attention import additive
from services.families.qwen2_5_omni.token2wav.sizes import DitSizes


class Blocks(NamedTuple):
    """The blocks of a batch of windows, (blocks,) tensors.

    Attributes:
        before, after: index of the neighbour; any index without one.
        has_before, has_after: bool.
        lengths: mel frames of a block. A window's last one may have fewer.
        positions: (blocks, block), of each frame in its window.
    """

    before: torch.Tensor
    after: torch.Tensor
    has_before: torch.Tensor
    has_after: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, frames: list[int], block: int, rows: int = 0) -> "Blocks":
        """Blocks, on the CPU, of windows of `frames` mel frames, padded to `rows` blocks."""
        counts = [-(-n // block) for n in frames]
        padding = max(0, rows - sum(counts))
        counts, frames = counts + [1] * padding, frames + [block] * padding
        index = torch.arange(sum(counts))
        place = torch.cat([torch.arange(count) for count in counts])  # of a block in its window
        ends = torch.cat([torch.arange(count) == count - 1 for count in counts])
        rest = torch.cat([n - block * torch.arange(count) for n, count in zip(frames, counts, strict=True)])
        return cls(
            before=(index - 1).clamp(min=0),
            after=(index + 1).clamp(max=len(index) - 1),
            has_before=place > 0,
            has_after=~ends,
            lengths=rest.clamp(max=block),
            positions=place[:, None] * block + torch.arange(block),
        )

    def to(self, device: torch.device) -> "Blocks":
        """Copies all at once."""
        rows, block = self.positions.shape
        copied = torch.cat([tensor.view(rows, -1).long() for tensor in self], dim=1).to(device)
        before, after, has_before, has_after, lengths = copied[:, :-block].T
        return Blocks(before, after, has_before.bool(), has_after.bool(), lengths, copied[:, -block:])


class Neighbours:
    """Rotary angles and masks of one evaluation, for all layers."""

    def __init__(self, blocks: Blocks, sizes: DitSizes, dtype: torch.dtype) -> None:
        self.blocks = blocks
        self._masks: dict[tuple[str, ...], torch.Tensor] = {}
        device = blocks.positions.device
        frames = torch.arange(sizes.block_size, device=device)
        own = frames < blocks.lengths[:, None]
        next_lengths = torch.where(blocks.has_after, blocks.lengths[blocks.after], 0)
        self._seen = {
            "before": blocks.has_before[:, None].expand(-1, sizes.block_size),
            "own": own,
            "after": frames < next_lengths[:, None],
        }
        exponents = torch.arange(0, sizes.head_dim, 2, device=device, dtype=torch.float) / sizes.head_dim
        angles = blocks.positions[..., None].float() * (1.0 / sizes.rope_theta**exponents)
        angles = torch.cat([angles, angles], dim=-1)
        # (2 x blocks, block, head_dim): with and without the condition.
        self.cos, self.sin = (each.to(dtype).repeat(2, 1, 1) for each in (angles.cos(), angles.sin()))

    def mask(self, kinds: tuple[str, ...]) -> torch.Tensor:
        """Which keys each block sees: (2 x blocks, 1, 1, keys), additive."""
        if kinds not in self._masks:
            seen = torch.cat([self._seen[kind] for kind in kinds], dim=1).repeat(2, 1)[:, None, None]
            self._masks[kinds] = additive(seen, self.cos.dtype)
        return self._masks[kinds]

    def gathered(self, x: torch.Tensor, kinds: tuple[str, ...]) -> torch.Tensor:
        """Joins blocks (2 x blocks, heads, block, width) with neighbours: (2 x blocks, heads, keys, width)."""
        if kinds == ("own",):
            return x
        pairs = x.view(2, -1, *x.shape[1:])
        of = {"before": self.blocks.before, "after": self.blocks.after}
        parts = [pairs if kind == "own" else pairs.index_select(1, of[kind]) for kind in kinds]
        return torch.cat(parts, dim=3).flatten(0, 1)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates (2 x blocks, block, head_dim)."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin
