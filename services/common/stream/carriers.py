"""What carries large tensors beside their gRPC stream: shared memory or UCX."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from quartet.v1 import stream_pb2, tensor_pb2
from services.common.rpc.errors import StageError

Notify = Callable[[StageError | None], None]
"""Called when a tensor that was carried is done with, and with the error when it will not arrive."""


class Carrier(Protocol):
    """Of one stream. For the event loop's thread only.

    Attributes:
        outstanding: tensors that are not done with.
        obstacle: why nothing can be carried now; "" if something may be.
    """

    @property
    def outstanding(self) -> int: ...

    @property
    def obstacle(self) -> str: ...

    def reserve(self, size_bytes: int) -> Any | None:
        """A place for a tensor of `size_bytes`; None if there is none now, for `obstacle`. Never waits."""
        ...

    async def carry(self, place: Any, tensor: torch.Tensor, /) -> tensor_pb2.Tensor:
        """Takes `tensor` (on the CPU) into its reserved `place`: the message by which the consumer gets it."""
        ...

    def release(self, lease_ids: Iterable[int]) -> None:
        """The consumer reads these no more.

        Raises:
            InvalidInput: one of them is not this stream's, or not any more.
        """
        ...

    def end(self) -> None:
        """The consumer is gone."""
        ...


class Carriers(Protocol):
    """By one transport, for all streams of a process.

    Attributes:
        transport: its name in settings, logs and metrics.
        offered: its name in messages.
        from_bytes: least size of a tensor that goes by it.
    """

    transport: str
    offered: stream_pb2.Transport
    from_bytes: int

    def terms(self, capabilities: stream_pb2.ConsumerCapabilities, notify: Notify) -> tuple[Carrier | None, str]:
        """(What carries to a new consumer of `capabilities`, ""), or None and why nothing does."""
        ...

    def close(self) -> None:
        """Ends all of it."""
        ...
