"""The consumer's side: tensors that a producer sends by UCX beside the stream that announces them."""

import asyncio

import numpy as np

from quartet.v1 import stream_pb2, tensor_pb2
from services.common.rpc.errors import InvalidInput
from services.common.stream.ucx.arrivals import TAG_BITS
from services.common.stream.ucx.worker import Worker

MAX_TENSOR_BYTES = 2**32


class Inbox:
    """Where one stream's tensors come in. For the event loop's thread only.

    Attributes:
        offer: by which a producer finds it.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.offer = stream_pb2.UcxInbox(worker_address=worker.address, tag=worker.open_tags())

    async def receive(self, handle: tensor_pb2.Ucx, field: str) -> np.ndarray:
        """The bytes of `handle`, (size_bytes,) uint8, when all are here. Cancelled, they are received all the same, for
        nobody.

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
