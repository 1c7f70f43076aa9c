"""What a stream's consumer is reading of its producer's arena."""

import itertools
from collections.abc import Iterable

import torch

from quartet.v1 import tensor_pb2
from services.common.rpc.errors import InvalidInput
from services.common.stream.carriers import Notify
from services.common.stream.shm.arena import Arena, Block
from services.common.stream.tensors import describe

_lease_ids = itertools.count(1)


class Leases:
    """One stream's leases in `arena`: its Carrier. For the event loop's thread only."""

    obstacle = "full"

    def __init__(self, arena: Arena, notify: Notify) -> None:
        self._arena, self._notify = arena, notify
        self._blocks: dict[int, Block] = {}
        self._ended = False

    @property
    def outstanding(self) -> int:
        """Tensors that the consumer may be reading."""
        return len(self._blocks)

    def reserve(self, size_bytes: int) -> Block | None:
        """Room for a tensor of `size_bytes`; None if there is none now."""
        return None if self._ended else self._arena.take(size_bytes)

    async def carry(self, block: Block, tensor: torch.Tensor) -> tensor_pb2.Tensor:
        """Moves `tensor` (on the CPU) into its reserved `block`: the message by which a consumer finds it."""
        await self._arena.fill(block, tensor)
        lease_id = next(_lease_ids)
        self._blocks[lease_id] = block
        message = describe(tensor)
        message.shared_memory.arena = self._arena.name
        message.shared_memory.offset_bytes = block.offset_bytes
        message.shared_memory.size_bytes = block.size_bytes
        message.shared_memory.lease_id = lease_id
        return message

    def release(self, lease_ids: Iterable[int]) -> None:
        """The consumer reads these no more.

        Raises:
            InvalidInput: one of them is not this stream's, or not any more.
        """
        for lease_id in lease_ids:
            block = self._blocks.pop(lease_id, None)
            if block is None:
                raise InvalidInput("credit.released", f"this stream holds no lease {lease_id}")
            self._arena.free(block)
        self._notify(None)

    def end(self) -> None:
        """The consumer is gone, and reads nothing."""
        self._ended = True
        self.release(list(self._blocks))
