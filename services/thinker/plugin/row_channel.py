"""Rows on their way from vLLM's worker to the front end, over ZMQ."""

import asyncio
import contextlib
import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import structlog
import torch
import zmq
import zmq.asyncio

from services.common.engine.device import Staging
from services.common.errors import InternalError
from services.common.stream.rows import Rows

LINGER_MS = 1000
ROWS_TIMEOUT_S = 10.0  # longest wait for the rows of a request that has its last token
# A front end's event loop handles a message of this size in well under a millisecond.
MESSAGE_BYTES = 1024 * 1024

log = structlog.get_logger()

Part = tuple[int, int, int]
"""Key of a request, position of the first row, number of rows."""

_Header = tuple[str, list[Part], str, list[int]]
"""Of a message: name of the rows, their parts, dtype, shape of a row."""


class RowSender:
    """Sends rows to the RowReceiver at `address` from a thread: the engine's step waits neither for a copy off the
    device nor for a socket."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._staging: Staging | None = None  # of the device that the first rows are on
        self._queue: queue.SimpleQueue[tuple[str, list[Part], torch.Tensor, torch.cuda.Event | None] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="row-sender", daemon=True)
        self._thread.start()

    def send(self, name: str, parts: list[Part], rows: torch.Tensor) -> None:
        """Sends rows `name`, (n, ...) on any device. Returns at once; the tensor must not be written to afterwards."""
        if self._staging is None:
            self._staging = Staging(rows.device)
        self._queue.put((name, parts, *self._staging.to_host(rows)))

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
                name, parts, rows, copied = item
                if copied is not None:
                    copied.synchronize()
                most_rows = max(1, MESSAGE_BYTES // rows[0].nbytes)
                for message, first, end in _split(parts, most_rows):
                    dtype = str(rows.dtype).removeprefix("torch.")
                    header: _Header = (name, message, dtype, list(rows.shape[1:]))
                    payload = rows[first:end].view(-1).view(torch.uint8).numpy().data
                    socket.send_multipart([msgspec.msgpack.encode(header), payload], copy=False)


def _split(parts: list[Part], most_rows: int) -> Iterator[tuple[list[Part], int, int]]:
    """Cuts `parts` into messages of at most `most_rows` rows: (parts, first row, end)."""
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


@dataclass
class Delivery:
    """Rows of one request on their way to its `sink`, counted."""

    sink: Callable[[Rows], None]
    received: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, expected: int) -> None:
        """Returns when `expected` rows were received. Raises InternalError: they do not come."""
        try:
            async with asyncio.timeout(ROWS_TIMEOUT_S):
                while self.received < expected:
                    self.more.clear()
                    await self.more.wait()
        except TimeoutError:
            raise InternalError(f"only {self.received} of {expected} rows of hidden states came") from None


class RowReceiver:
    """The front end's end, at `address`. For the event loop's thread only.

    Args:
        directory: of the socket. Who can enter it can send rows.
    """

    def __init__(self, directory: str) -> None:
        self.address = f"ipc://{directory}/rows-{uuid.uuid4().hex[:8]}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(self.address)
        self._deliveries: dict[int, Delivery] = {}
        self._task = asyncio.create_task(self._run())

    @contextlib.contextmanager
    def deliver(self, key: int, sink: Callable[[Rows], None]) -> Iterator[Delivery]:
        """Gives `sink` the rows of request `key` while the context is open. Rows of other requests are dropped."""
        delivery = self._deliveries[key] = Delivery(sink)
        try:
            yield delivery
        finally:
            del self._deliveries[key]

    @property
    def failed(self) -> bool:
        """Whether rows are received no more."""
        return self._task.done()

    async def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(_Header)
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                raw_header, payload = frames
                name, parts, dtype, row_shape = decoder.decode(raw_header.buffer)
                rows = torch.frombuffer(payload.buffer, dtype=getattr(torch, dtype)).view(-1, *row_shape)
            except (ValueError, AttributeError, TypeError, RuntimeError, msgspec.MsgspecError):
                log.exception("rows that cannot be read are dropped")
                continue
            first = 0
            for key, first_position, count in parts:
                if delivery := self._deliveries.get(key):
                    delivery.received += count
                    delivery.sink(Rows(name, first_position, rows[first : first + count]))
                    delivery.more.set()
                first += count

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._socket.close(linger=0)
        self._context.term()
