"""What a stream carries from one step to the next, for a fixed number of streams.

Every layer that looks back owns one buffer, shape (slots, ...): the last inputs of a convolution, the overhang of a
transposed convolution, the window of keys and values of an attention layer. All are zero at the start of a stream,
which is exactly the zero padding of a whole decode. A slot is one index into all buffers, so the streams of a batch
are gathered by indexing, wherever each of them stands.
"""

from collections.abc import Sequence

import torch


class StreamStates:
    """States of up to `slots` streams. Used by one thread.

    Args:
        shapes: shape of each buffer, without the slot dimension; a layer knows its buffer by its index.
        slots: streams that can be open at a time.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffers = [torch.zeros(slots, *shape, dtype=dtype, device=device) for shape in shapes]
        self.frames = [0] * slots
        self._free = list(range(slots))[::-1]

    @property
    def free_slots(self) -> int:
        """Slots that can be acquired."""
        return len(self._free)

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot."""
        return sum(buffer[0].nbytes for buffer in self.buffers)

    def acquire(self) -> int | None:
        """A slot in the state of a stream's start, or None if all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.frames[slot] = 0
        for buffer in self.buffers:
            buffer[slot].zero_()
        return slot

    def release(self, slot: int) -> None:
        """Gives a slot back."""
        self._free.append(slot)

    def batch(self, slots: Sequence[int]) -> "Batch":
        """The states of the streams in `slots` (all different), in that order."""
        return Batch(self, slots)


class Batch:
    """States of the streams that step together."""

    def __init__(self, states: StreamStates, slots: Sequence[int]) -> None:
        self._states = states
        self._slots = list(slots)
        self._index = torch.tensor(self._slots, device=states.buffers[0].device)

    @property
    def frames(self) -> list[int]:
        """Frames that each stream has decoded so far."""
        return [self._states.frames[slot] for slot in self._slots]

    def take(self, buffer: int) -> torch.Tensor:
        """Copy of a layer's state, shape (streams, ...)."""
        return self._states.buffers[buffer].index_select(0, self._index)

    def keep(self, buffer: int, state: torch.Tensor) -> None:
        """Replaces a layer's state, shape (streams, ...)."""
        self._states.buffers[buffer].index_copy_(0, self._index, state)

    def advance(self, frames: int) -> None:
        """Counts the frames of a finished step."""
        for slot in self._slots:
            self._states.frames[slot] += frames
