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
MIN_BYTES = 256 * 1024  # smaller tensors are faster inline
HUNG_S = 5.0  # longest wait for a consumer whose call has ended to take or refuse what is on its way

log = structlog.get_logger()


class UcxSession:
    """A TransportSession to `receiver`. What is ready before it has connected goes inline."""

    def __init__(self, worker: UcxWorker, receiver: stream_pb2.UcxInbox, notify: Notify) -> None:
        self._worker, self._notify = worker, notify
        self._peer = worker.peer(receiver.worker_address)
        self._tags = iter(range(receiver.tag, receiver.tag + 2**TAG_BITS))
        self._sending: set[asyncio.Future[None]] = set()

    @property
    def outstanding(self) -> int:
        return len(self._sending)

    @property
    def obstacle(self) -> str:
        return self._peer.obstacle

    def reserve(self, size_bytes: int) -> int | None:
        """The tag for a tensor."""
        return None if self._peer.obstacle else next(self._tags, None)

    async def send(self, tag: int, tensor: torch.Tensor) -> tensor_pb2.Tensor:
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
        raise InvalidInput("credit.released", "this stream lends nothing")

    def consumer_left(self) -> None:
        """A consumer refuses what it has not taken; one that does not is dropped."""
        if self._sending:
            asyncio.get_running_loop().call_later(HUNG_S, self._drop)

    def _drop(self) -> None:
        if self._sending:
            log.warning("UCX peer takes nothing: dropped", tensors=len(self._sending))
            self._worker.drop(self._peer)


class UcxTransport:
    """A Transport by the process's `worker`."""

    name = "ucx"

    def __init__(self, worker: UcxWorker, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self._worker = worker

    def negotiate(self, capabilities: stream_pb2.ConsumerCapabilities, notify: Notify) -> tuple[UcxSession | None, str]:
        if stream_pb2.TRANSPORT_UCX not in capabilities.transports or not capabilities.HasField("ucx"):
            return None, "not_offered"
        return UcxSession(self._worker, capabilities.ucx, notify), ""

    def receiver(self) -> "UcxReceiver":
        """What a consumer receives a stream's tensors by."""
        return UcxReceiver(self._worker)

    def close(self) -> None:
        self._worker.close()


class UcxReceiver:
    """Receives one stream's tensors; `offer` is for its producer. For the event loop's thread only."""

    def __init__(self, worker: UcxWorker) -> None:
        self._worker = worker
        self.offer = stream_pb2.UcxInbox(worker_address=worker.address, tag=worker.open_tags())

    async def receive(self, handle: tensor_pb2.Ucx, field: str) -> np.ndarray:
        """The whole message, (size_bytes,) uint8. If cancelled, UCX receives it all the same.

        Raises:
            InvalidInput: `handle` names no message of this stream, or one of another size.
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


def open_ucx(settings: StageSettings) -> UcxTransport | None:
    """A stage's UCX. None if the settings want none, or, after logging why, if there can be none."""
    if "ucx" not in settings.transports:
        return None
    try:
        return UcxTransport(UcxWorker(), settings.large_tensor_bytes or MIN_BYTES)
    except (ImportError, OSError) as error:
        log.warning("no UCX: tensors go inline; pip install 'quartet[ucx]'", reason=str(error))
        return None
