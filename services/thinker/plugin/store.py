"""Rows of every token whose keys and values are in the KV cache."""

from collections.abc import Mapping, Sequence

import torch

from services.thinker.plugin.rows import ROPE_POSITIONS, hidden_states


def row_bytes(layers: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Memory of one token's rows: `layers` states of `hidden_size` elements, and three rope positions."""
    return layers * hidden_size * dtype.itemsize + 3 * torch.int32.itemsize


class RowStore:
    """One row of each kind per KV slot.

    A row is written by the forward pass that fills its slot, and so lives exactly as long as the slot's keys and
    values: the rows of a prompt that the prefix cache has are here, nothing is recomputed for them.

    Args:
        num_slots: slots of the KV cache, num_blocks x block_size.
        layers: layers whose states are kept, ascending; 0 is the embeddings.
        hidden_size: elements of a state.
        dtype: dtype of the states.
        device: where the model is.
    """

    def __init__(
        self, num_slots: int, layers: Sequence[int], hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        rows = num_slots + 1  # the last one takes the padding of a batch
        self.device = device
        self.num_slots = num_slots
        self._padding_slot = num_slots
        self._layers = tuple(layers)
        self._states = [torch.zeros(rows, hidden_size, dtype=dtype, device=device) for _ in layers]
        self._rope_positions = torch.zeros(rows, 3, dtype=torch.int32, device=device)
        self._by_name: Mapping[str, torch.Tensor] = {
            ROPE_POSITIONS: self._rope_positions,
            **{hidden_states(layer): states for layer, states in zip(layers, self._states, strict=True)},
        }

    @property
    def size_bytes(self) -> int:
        """Memory taken."""
        return sum(rows.nbytes for rows in self._by_name.values())

    def write(self, slots: torch.Tensor, states: Sequence[torch.Tensor], rope_positions: torch.Tensor) -> None:
        """Keeps the rows of a batch. No synchronisation and no branch on data: may be captured in a CUDA graph.

        Args:
            slots: (n) int64, negative for padding; may be shorter than the batch, what is beyond it is padding.
            states: for each layer (>= n, hidden_size).
            rope_positions: (3, >= n), temporal, height, width.
        """
        count = slots.shape[0]
        slots = torch.where(slots < 0, self._padding_slot, slots)
        for kept, new in zip(self._states, states, strict=True):
            kept.index_copy_(0, slots, new[:count])
        self._rope_positions.index_copy_(0, slots, rope_positions[:, :count].t().to(torch.int32))

    def read(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        """Rows `name` of `slots` ((n) int64): (n, ...), on the store's device, a copy."""
        return self._by_name[name].index_select(0, slots)


_store: RowStore | None = None


def install(store: RowStore | None) -> None:
    """Makes `store` the one of this process: the model and the connector of a worker share it."""
    global _store
    _store = store


def installed() -> RowStore | None:
    """This process's store. None until the KV cache exists, and where nothing is to be kept."""
    return _store
