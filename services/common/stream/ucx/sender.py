"""The producer's side: sends large tensors by UCX to consumers that can be reached so."""

import asyncio
from collections.abc import Iterable

import structlog
import torch

from quartet.v1 import stream_pb2, tensor_pb2
from services.common.rpc.errors import InvalidInput, StageError
from services.common.stream.carriers import Notify
from services.common.stream.tensors import as_bytes, describe
from services.common.stream.ucx.arrivals import TAG_BITS
from services.common.stream.ucx.worker import Worker

HUNG_S = 5.0
"""Longest wait for a consumer whose call has ended to take or refuse what is on its way to it."""

log = structlog.get_logger()


class Sender:
    """A process's Carriers by UCX, for tensors of `from_bytes` or more."""

    transport = "ucx"
    offered = stream_pb2.TRANSPORT_UCX

    def __init__(self, worker: Worker, from_bytes: int) -> None:
        self.from_bytes = from_bytes
        self._worker = worker

    def terms(self, capabilities: stream_pb2.ConsumerCapabilities, notify: Notify) -> "tuple[Sends | None, str]":
        """(What sends to a new consumer of `capabilities`, ""), or None and why nothing does."""
        if stream_pb2.TRANSPORT_UCX not in capabilities.transports or not capabilities.HasField("ucx"):
            return None, "not_offered"
        return Sends(self._worker, capabilities.ucx, notify), ""

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()


class Sends:
    """One stream's, to `inbox`: its Carrier. For the event loop's thread only.

    The consumer is connected to while the engine works on what it is to get; what is ready before that goes inline.
    """

    def __init__(self, worker: Worker, inbox: stream_pb2.UcxInbox, notify: Notify) -> None:
        self._worker, self._notify = worker, notify
        self._peer = worker.peer(inbox.worker_address)
        self._tags = iter(range(inbox.tag, inbox.tag + 2**TAG_BITS))
        self._sending: set[asyncio.Future[None]] = set()

    @property
    def outstanding(self) -> int:
        """Tensors that are on their way."""
        return len(self._sending)

    @property
    def obstacle(self) -> str:
        """Why nothing can be sent now: "connecting" or "unreachable"; "" if something can."""
        return self._peer.obstacle

    def reserve(self, size_bytes: int) -> int | None:
        """The tag for a tensor; None if it cannot be sent now."""
        return None if self._peer.obstacle else next(self._tags, None)

    async def carry(self, place: int, tensor: torch.Tensor) -> tensor_pb2.Tensor:
        """Begins to send `tensor` (on the CPU) with the tag `place`: the message that announces it."""
        data = as_bytes(tensor)
        sending = asyncio.wrap_future(self._worker.send(self._peer, data, place))
        self._sending.add(sending)
        sending.add_done_callback(self._sent)
        message = describe(tensor)
        message.ucx.tag, message.ucx.size_bytes = place, data.nbytes
        return message

    def _sent(self, sending: asyncio.Future[None]) -> None:
        self._sending.discard(sending)
        error = None if sending.cancelled() else sending.exception()
        self._notify(error if isinstance(error, StageError) else None)

    def release(self, lease_ids: Iterable[int]) -> None:
        """Nothing is lent.

        Raises:
            InvalidInput: always.
        """
        raise InvalidInput("credit.released", "this stream lends nothing")

    def end(self) -> None:
        """The consumer is gone: it refuses what it has not taken, unless all of it is gone."""
        if self._sending:
            asyncio.get_running_loop().call_later(HUNG_S, self._drop)

    def _drop(self) -> None:
        if self._sending:
            log.warning("UCX peer takes nothing: dropped", tensors=len(self._sending))
            self._worker.drop(self._peer)
