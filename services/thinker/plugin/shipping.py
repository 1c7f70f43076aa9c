"""From the worker that gathers rows to the front end that asked for them, over ZMQ."""

import asyncio
import contextlib
import logging
import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import torch
import zmq
import zmq.asyncio

from services.common.engine.device import Staging

LINGER_MS = 1000
# A front end's event loop handles a message of this size in well under a millisecond.
MESSAGE_BYTES = 1024 * 1024

log = logging.getLogger(__name__)

Part = tuple[int, int, int]
"""Key of a request, position of the first row, number of rows."""


@dataclass(frozen=True)
class Shipment:
    """What a gathered tensor holds.

    Attributes:
        name: name of the rows.
        parts: whose rows they are, in order.
    """

    name: str
    parts: list[Part]


@dataclass(frozen=True)
class ShippedRows:
    """Rows `name` of one request, from position `first_position` on.

    Attributes:
        rows: (count, ...) on the CPU; the memory is shared with other rows and must not be written to.
    """

    name: str
    first_position: int
    rows: torch.Tensor


class _Header(msgspec.Struct):
    name: str
    parts: list[Part]
    dtype: str
    row_shape: list[int]


def free_address() -> str:
    """An address for a RowReceiver: a Unix socket in the abstract namespace, which leaves no file behind."""
    return f"ipc://@quartet-{uuid.uuid4()}"


class Shipper:
    """Sends gathered rows from a thread, so that the engine's step waits neither for a copy off the device nor for a
    socket.

    Args:
        address: where the front end's RowReceiver listens.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._staging: Staging | None = None  # of the device that the first rows are on
        self._queue: queue.SimpleQueue[tuple[Shipment, torch.Tensor, torch.cuda.Event | None] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="row-shipper", daemon=True)
        self._thread.start()

    def ship(self, shipment: Shipment, rows: torch.Tensor) -> None:
        """Sends `rows` ((n, ...) on any device). Returns at once; the tensor must not be written to afterwards."""
        if self._staging is None:
            self._staging = Staging(rows.device)
        self._queue.put((shipment, *self._staging.to_host(rows)))

    def close(self) -> None:
        """Sends what is queued, then ends the thread."""
        self._queue.put(None)
        self._thread.join(timeout=LINGER_MS / 1000)

    def _run(self) -> None:
        try:
            self._send()
        except BaseException:
            # Without its rows every spoken request would wait in vain: the engine ends, and is started anew.
            log.exception("sending rows failed")
            os._exit(1)

    def _send(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.set(zmq.SNDHWM, 0)  # what is in flight is bounded by the requests' contexts
            socket.set(zmq.LINGER, LINGER_MS)
            socket.connect(self._address)
            while (item := self._queue.get()) is not None:
                shipment, rows, copied = item
                if copied is not None:
                    copied.synchronize()
                most_rows = max(1, MESSAGE_BYTES // rows[0].nbytes)
                for message, first, end in _split(shipment.parts, most_rows):
                    dtype = str(rows.dtype).removeprefix("torch.")
                    header = _Header(shipment.name, message, dtype, list(rows.shape[1:]))
                    payload = rows[first:end].view(-1).view(torch.uint8).numpy().data
                    socket.send_multipart([msgspec.msgpack.encode(header), payload], copy=False)


def _split(parts: list[Part], most_rows: int) -> Iterator[tuple[list[Part], int, int]]:
    """Cuts `parts` into messages of at most `most_rows` rows: their parts, and which of the rows they hold."""
    message: list[Part] = []
    first = end = 0
    for key, position, count in parts:
        while count:
            taken = min(count, most_rows - (end - first))
            message.append((key, position, taken))
            position, count, end = position + taken, count - taken, end + taken
            if end - first == most_rows:
                yield message, first, end
                message, first = [], end
    if message:
        yield message, first, end


class RowReceiver:
    """The front end's end. For the event loop's thread only.

    Attributes:
        address: where Shippers connect to.
    """

    def __init__(self) -> None:
        self.address = free_address()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(self.address)
        self._sinks: dict[int, Callable[[ShippedRows], None]] = {}
        self._task = asyncio.create_task(self._run())

    @contextlib.contextmanager
    def deliver(self, key: int, sink: Callable[[ShippedRows], None]) -> Iterator[None]:
        """While the context is open, `sink` gets the rows of request `key`; rows of unknown requests (such as were
        aborted) are dropped."""
        self._sinks[key] = sink
        try:
            yield
        finally:
            del self._sinks[key]

    def __len__(self) -> int:
        return len(self._sinks)

    @property
    def failed(self) -> bool:
        """Whether rows are no longer received."""
        return self._task.done()

    async def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(_Header)
        while True:
            raw_header, payload = await self._socket.recv_multipart(copy=False)
            header = decoder.decode(raw_header.buffer)
            dtype = getattr(torch, header.dtype)
            rows = torch.frombuffer(payload.buffer, dtype=dtype).view(-1, *header.row_shape)
            first = 0
            for key, first_position, count in header.parts:
                if sink := self._sinks.get(key):
                    sink(ShippedRows(header.name, first_position, rows[first : first + count]))
                first += count

    async def close(self) -> None:
        """Stops receiving."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._socket.close(linger=0)
        self._context.term()
