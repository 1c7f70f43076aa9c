"""The open streams of a producer, by id."""

import asyncio
from collections.abc import Sequence

from quartet.v1 import stream_pb2
from services.common.rpc.errors import AlreadyExists, InvalidInput, NotFound
from services.common.stream.output_stream import OutputStream
from services.common.stream.transport import Transport

LINGER_S = 30.0


class StreamHub:
    """The open streams of a producer.

    A consumer may come before its stream is opened, or up to `LINGER_S` seconds after the request behind it has ended.

    Attributes:
        transports: ways of large tensors, the preferred first; without any, all tensors go inline.
    """

    def __init__(self) -> None:
        self.transports: list[Transport] = []
        self._streams: dict[str, OutputStream] = {}
        self._awaited: dict[str, set[asyncio.Event]] = {}
        self._consumers = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, stream_id: str, rows: Sequence[str]) -> OutputStream:
        """A new stream that offers `rows`.

        Raises:
            InvalidInput: the id is in use.
        """
        if stream_id in self._streams:
            raise InvalidInput("output_stream_id", f"'{stream_id}' is in use; ids must be unique")
        stream = self._streams[stream_id] = OutputStream(stream_id, rows, on_exit=self._request_ended)
        for arrived in self._awaited.get(stream_id, ()):
            arrived.set()
        return stream

    async def claim(self, subscription: stream_pb2.Subscription, timeout_s: float) -> OutputStream:
        """The stream of `subscription`, now bound to that consumer.

        Raises:
            NotFound: it was not opened within `timeout_s`.
            AlreadyExists: it has a consumer already.
            InvalidInput: it does not offer what is asked for.
        """
        stream_id = subscription.stream_id
        if stream_id not in self._streams:
            arrived = asyncio.Event()
            self._awaited.setdefault(stream_id, set()).add(arrived)
            try:
                await asyncio.wait_for(arrived.wait(), timeout_s)
            except TimeoutError:
                raise NotFound(f"stream {stream_id} was not opened within {timeout_s:g} s") from None
            finally:
                self._awaited[stream_id].discard(arrived)
                if not self._awaited[stream_id]:
                    del self._awaited[stream_id]
        stream = self._streams.get(stream_id)
        if stream is None or stream.taken:
            raise AlreadyExists(f"stream {stream_id} has a consumer already")
        stream.accept(subscription)
        stream.choose_transport(self.transports)
        return stream

    def consumer_came(self) -> None:
        """A consumer's call began."""
        self._consumers += 1
        self._idle.clear()

    def consumer_left(self, stream: OutputStream | None) -> None:
        """A consumer's call ended: its stream, if any, is done with."""
        self._consumers -= 1
        if not self._consumers:
            self._idle.set()
        if stream:
            stream.consumer_left()
            self._forget(stream)

    def _request_ended(self, stream: OutputStream) -> None:
        """A late consumer still finds the stream, and how it ended, for a while."""
        if not stream.taken:
            asyncio.get_running_loop().call_later(LINGER_S, self._forget, stream)

    def _forget(self, stream: OutputStream) -> None:
        if self._streams.get(stream.stream_id) is stream:
            del self._streams[stream.stream_id]

    async def drain(self) -> None:
        """Returns when no consumer is being served."""
        await self._idle.wait()

    @property
    def pending_positions(self) -> int:
        """Positions that wait for their consumers' credit, of all streams. May be read from any thread."""
        return sum(stream.pending_positions for stream in list(self._streams.values()))

    @property
    def credits(self) -> int:
        """Chunks that consumers have granted and not got. May be read from any thread."""
        return sum(stream.credits for stream in list(self._streams.values()))

    def __len__(self) -> int:
        return len(self._streams)
