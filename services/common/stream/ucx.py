"""Large tensors by UCX: a producer sends them beside the stream that announces them."""

import asyncio
from collections.abc import Iterable

import numpy as np
import structlog
import torch

from quartet.v1 import stream_pb2, tensor_pb2
from services.common.errors import InvalidInput, StageError
from services.common.rpc.settings import StageSettings
from services.common.stream.tensors import Notify, as_bytes, describe
from services.common.stream.ucx_worker import TAG_BITS, UcxWorker

MAX_TENSOR_BYTES = 2**32
HUNG_S = 5.0
"""Longest wait for a consumer whose call has ended to take or refuse what is on its way to it."""

log = structlog.get_logger()


class UcxSession:
    """Sends one stream's tensors to `receiver`: a TransportSession.

    It connects to the consumer while the engine works. What is ready before it is connected goes inline.
    """

    def __init__(self, worker: UcxWorker, receiver: stream_pb2.UcxInbox, notify: Notify) -> None:
        self._worker, self._notify = worker, notify
        self._peer = worker.peer(receiver.worker_address)
        self._tags = iter(range(receiver.tag, receiver.tag + 2**TAG_BITS))
        self._sending: set[asyncio.Future[None]] = set()

    @property
    def outstanding(self) -> int:
        """Number of tensors that are on their way."""
        return len(self._sending)

    @property
    def obstacle(self) -> str:
        """Why nothing can be sent now: "connecting" or "unreachable"; "" if something can."""
        return self._peer.obstacle

    def reserve(self, size_bytes: int) -> int | None:
        """The tag for a tensor; None if it cannot be sent now."""
        return None if self._peer.obstacle else next(self._tags, None)

    async def send(self, tag: int, tensor: torch.Tensor) -> tensor_pb2.Tensor:
        """Begins to send `tensor` (on the CPU) with its reserved `tag`; returns the message that announces it."""
        data = as_bytes(tensor)
        sending = asyncio.wrap_future(self._worker.send(self._peer, data, tag))
        self._sending.add(sending)
        sending.add_done_callback(self._sent)
        return describe(tensor, ucx=tensor_pb2.Ucx(tag=tag, size_bytes=data.nbytes))

    def _sent(self, sending: asyncio.Future[None]) -> None:
        self._sending.discard(sending)
        error = None if sending.cancelled() else sending.exception()
        self._notify(error if isinstance(error, StageError) else None)

    def release(self, lease_ids: Iterable[int]) -> None:
        """UCX lends nothing.

        Raises:
            InvalidInput: always.
        """
        raise InvalidInput("credit.released", "this stream lends nothing")

    def consumer_left(self) -> None:
        """The consumer refuses what it has not taken, unless its process is gone too: then it is dropped."""
        if self._sending:
            asyncio.get_running_loop().call_later(HUNG_S, self._drop)

    def _drop(self) -> None:
        if self._sending:
            log.warning("UCX peer takes nothing: dropped", tensors=len(self._sending))
            self._worker.drop(self._peer)


class UcxTransport:
    """A Transport by the process's `worker`, for tensors of `min_bytes` or more."""

    name = "ucx"

    def __init__(self, worker: UcxWorker, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self._worker = worker

    def negotiate(self, capabilities: stream_pb2.ConsumerCapabilities, notify: Notify) -> tuple[UcxSession | None, str]:
        """See `Transport.negotiate`."""
        if stream_pb2.TRANSPORT_UCX not in capabilities.transports or not capabilities.HasField("ucx"):
            return None, "not_offered"
        return UcxSession(self._worker, capabilities.ucx, notify), ""

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()


class UcxReceiver:
    """Receives the tensors of one stream, on its consumer's side. For the event loop's thread only.

    Attributes:
        offer: by which a producer finds it.
    """

    def __init__(self, worker: UcxWorker) -> None:
        self._worker = worker
        self.offer = stream_pb2.UcxInbox(worker_address=worker.address, tag=worker.open_tags())

    async def receive(self, handle: tensor_pb2.Ucx, field: str) -> np.ndarray:
        """The bytes of `handle`, (size_bytes,) uint8, when all are here.

        When this is cancelled, UCX receives them all the same, and they are dropped.

        Raises:
            InvalidInput: `handle` names no message of this stream, or that message has another size.
            Unavailable: it broke off.
        """
        if handle.tag >> TAG_BITS != self.offer.tag >> TAG_BITS:
            raise InvalidInput(f"{field}.tag", "is not one of this stream's")
        if not 1 <= handle.size_bytes <= MAX_TENSOR_BYTES:
            raise InvalidInput(f"{field}.size_bytes", f"must be 1 to {MAX_TENSOR_BYTES}")
        arriving = asyncio.wrap_future(self._worker.receive(handle.tag, handle.size_bytes))
        arriving.add_done_callback(lambda arrived: arrived.exception())  # nobody may be left to ask
        try:
            return await asyncio.shield(arriving)
        except ValueError as error:
            raise InvalidInput(f"{field}.size_bytes", str(error)) from None

    def close(self) -> None:
        """Refuses what has not been received, and what still comes."""
        self._worker.close_tags(self.offer.tag)


def open_ucx_worker(settings: StageSettings) -> UcxWorker | None:
    """The UCX worker of a stage. None if the settings want none, or, after logging why, if there can be none."""
    if "ucx" not in settings.transports:
        return None
    try:
        return UcxWorker()
    except (ImportError, OSError) as error:
        log.warning("no UCX: tensors go inline; pip install 'quartet[ucx]'", reason=str(error))
        return None
