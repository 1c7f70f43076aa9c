"""What carries large tensors beside the gRPC stream that announces them: shared memory or UCX."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from quartet.v1 import stream_pb2, tensor_pb2
from services.common.rpc.errors import StageError

Notify = Callable[[StageError | None], None]
"""Called when the consumer is done with a tensor; with an error when the tensor will not arrive."""


class TransportSession(Protocol):
    """Carries the large tensors of one stream to its consumer. For the event loop's thread only.

    Attributes:
        outstanding: number of tensors that the consumer is not done with.
        obstacle: why nothing can be sent now, e.g. "full"; "" if something may be.
    """

    @property
    def outstanding(self) -> int: ...

    @property
    def obstacle(self) -> str: ...

    def reserve(self, size_bytes: int) -> Any | None:
        """A place for a tensor of `size_bytes`; None if there is none now, because of `obstacle`. Never waits."""
        ...

    async def send(self, place: Any, tensor: torch.Tensor, /) -> tensor_pb2.Tensor:
        """Puts `tensor` (any shape, on the CPU) into its reserved `place`; returns the message that announces it."""
        ...

    def release(self, lease_ids: Iterable[int]) -> None:
        """The consumer no longer reads these leases.

        Raises:
            InvalidInput: the stream does not hold one of them.
        """
        ...

    def consumer_left(self) -> None:
        """The consumer's call has ended: it reads nothing any more."""
        ...


class Transport(Protocol):
    """One way to carry tensors, for all streams of a process.

    Attributes:
        name: as in settings, logs and metrics.
        kind: as in messages.
        min_bytes: least size of a tensor that goes this way.
    """

    name: str
    kind: stream_pb2.Transport
    min_bytes: int

    def negotiate(
        self, capabilities: stream_pb2.ConsumerCapabilities, notify: Notify
    ) -> tuple[TransportSession | None, str]:
        """(A session with a new consumer of `capabilities`, ""); or (None, why there can be none)."""
        ...

    def close(self) -> None:
        """Ends all sessions."""
        ...
