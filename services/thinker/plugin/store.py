"""Rows of every token whose keys and values are in the KV cache."""

from collections.abc import Sequence

import torch

from services.thinker.plugin.rows import RowKind


class RowStore:
    """One row of each kind per KV slot.

    A row is written by the forward pass that fills its slot, and so lives exactly as long as the slot's keys and
    values: the rows of a prompt that the prefix cache has are here, nothing is recomputed for them.

    Args:
        num_slots: slots of the KV cache, num_blocks x block_size.
        kinds: what is kept.
        model_dtype: dtype of the model.
        device: where the model is.
    """

    def __init__(
        self, num_slots: int, kinds: Sequence[RowKind], model_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device = device
        self.num_slots = num_slots
        self._padding_slot = num_slots  # one row more takes the padding of a batch
        self._by_name = {
            kind.name: torch.zeros(num_slots + 1, kind.width, dtype=kind.torch_dtype(model_dtype), device=device)
            for kind in kinds
        }

    @property
    def size_bytes(self) -> int:
        """Memory taken."""
        return sum(rows.nbytes for rows in self._by_name.values())

    def write(self, slots: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """Keeps the rows of a batch. No synchronisation and no branch on data: may be captured in a CUDA graph.

        Args:
            slots: (n) int64, negative for padding; may be shorter than the batch, what is beyond it is padding.
            rows: for each kind, in order, (>= n, width).
        """
        count = slots.shape[0]
        slots = torch.where(slots < 0, self._padding_slot, slots)
        for kept, new in zip(self._by_name.values(), rows, strict=True):
            kept.index_copy_(0, slots, new[:count].to(kept.dtype))

    def read(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        """Rows `name` of `slots` ((n) int64): (n, width), on the store's device, a copy."""
        return self._by_name[name].index_select(0, slots)


_store: RowStore | None = None


def install(store: RowStore | None) -> None:
    """Makes `store` the one of this process. It is one of vLLM's, with one engine in it: the model and the connector
    of a worker, which vLLM makes apart from each other, share the store so."""
    global _store
    _store = store


def installed() -> RowStore | None:
    """This process's store. None until the KV cache exists, and where nothing is to be kept."""
    return _store
