"""The process's UCX worker, and the one thread that uses it."""

# ucxx has no types
# pyright: basic

import contextlib
import math
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from services.common.errors import Unavailable

log = structlog.get_logger()

TAG_BITS = 24  # lower bits of a tag: a message's number within its stream; the upper bits name the stream
MOST_KEPT = 1024  # messages of a stream that no receiver waits for: as many as a consumer may grant credit for at once

_HELLO_TAG = 0  # of messages that only open a connection; refused, as it is no stream's
_CLOSE_NS = 10**9  # the most that closing an endpoint, or all of them, may take
CONNECT_TIMEOUT_S = 5.0

# UCX reads them as it is loaded; what an operator has set stays.
_ENVIRONMENT = {
    # What goes wrong is raised, and logged by the caller.
    "UCX_LOG_LEVEL": "fatal",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # Over TCP five times as fast as with its 8 KiB: 7.3 against 1.3 GB/s at 8 MiB.
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    # Larger ones wait at their sender, and fill nothing here if nobody takes them.
    "UCX_RNDV_THRESH": "8192",
}


@dataclass(eq=False)
class Peer:
    """Another process's worker.

    Attributes:
        obstacle: "connecting" or "unreachable"; "" if it can be sent to.
        endpoint: UCX's connection, for the worker's thread.
        connects_until: time.monotonic() seconds, for the worker's thread.
    """

    address: bytes
    obstacle: str = "connecting"
    endpoint: Any = None
    connects_until: float = math.inf


@dataclass(frozen=True)
class _Wanted:
    size_bytes: int
    future: Future[np.ndarray]


class UcxWorker:
    """UCX in this process, over the devices that UCX's own variables (UCX_TLS, UCX_NET_DEVICES) allow. The methods
    return at once; the worker's thread does what they ask for.

    Large messages wait at their sender until they are received or refused (UCX's rendezvous). A sent message cannot be
    called back.

    Attributes:
        address: by which other workers reach this one.

    Raises:
        ImportError: `ucxx` is not installed.
        OSError: UCX cannot be used here.
    """

    def __init__(self) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import ucxx._lib.libucxx as api  # its asyncio layer would make progress on the event loop
        from ucxx._lib.arr import Array

        self._api, self._array = api, Array
        try:
            self._ucx: Any = api.UCXWorker(
                api.UCXContext({}), enable_delayed_submission=False, enable_python_future=False
            )
            self._ucx.init_blocking_progress_mode()
            self.address: bytes = self._ucx.address.tobytes()
        except api.UCXError as error:
            raise OSError(f"UCX: {error}") from None
        self._all_tags = api.UCXXTag(0), api.UCXXTagMask(0)
        self._refused = Array(np.empty(8, np.uint8))
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._open, self._ended, self._closed = True, False, False
        self._running: list[tuple[Any, Future[Any], Any, Any]] = []  # request, its future and result, memory it uses
        self._peers: dict[bytes, Peer] = {}
        self._kept: dict[int, dict[int, Any]] = {}  # of each stream: messages that no receiver waits for yet, by tag
        self._wanted: dict[int, _Wanted] = {}  # who waits for the message of a tag
        self._thread = threading.Thread(target=self._drive, name="ucx", daemon=True)
        self._thread.start()

    def peer(self, address: bytes) -> Peer:
        """The worker at `address`; begins to connect to a new one."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address)
            self._do(lambda: self._connect(peer))
        return peer

    def drop(self, peer: Peer) -> None:
        """Ends the connection; what is being sent fails."""
        self._do(lambda: self._lose(peer))

    def send(self, peer: Peer, data: np.ndarray, tag: int) -> Future[None]:
        """Sends `data`, (bytes,) uint8, which must not change until the future is done: received or refused.

        Raises (the future):
            Unavailable: the peer is gone, or out of reach.
        """
        done: Future[None] = Future()
        self._do(lambda: self._send(peer, data, tag, done))
        return done

    def open_tags(self) -> int:
        """The first of 2^TAG_BITS tags whose messages are kept until they are received."""
        while (stream := secrets.randbits(64 - TAG_BITS)) in self._kept or not stream:
            pass
        self._kept[stream] = {}
        return stream << TAG_BITS

    def receive(self, tag: int, size_bytes: int) -> Future[np.ndarray]:
        """The whole message of an open tag, (size_bytes,) uint8.

        Raises (the future):
            ValueError: it has another size.
            Unavailable: it broke off, or the tag was closed.
        """
        wanted = _Wanted(size_bytes, Future())
        self._do(lambda: self._want(tag, wanted))
        return wanted.future

    def close_tags(self, first_tag: int) -> None:
        """Refuses what has come with these tags and what still comes, save what is being received."""
        self._do(lambda: self._close_stream(first_tag >> TAG_BITS))

    def close(self) -> None:
        """Ends connections and thread. What is under way, and what is requested later, fails."""
        if not self._closed:
            self._closed = True
            self._do(self._end)
            self._thread.join()
            os.close(self._wake)

    # From here on in the worker's thread.

    def _do(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended:
                self._commands.append(command)
                os.eventfd_write(self._wake, 1)
                return
        command()  # which says that there is no connection

    def _drive(self) -> None:
        try:
            with select.epoll() as poll:
                poll.register(self._ucx.epoll_file_descriptor, select.EPOLLIN)
                poll.register(self._wake, select.EPOLLIN)
                while self._open:
                    self._work()
                    if not self._commands and self._open and self._ucx.arm():
                        poll.poll(self._next_timeout_s())
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._wake)
        except Exception:
            log.exception("UCX failed: tensors go inline")
        with self._lock:
            self._ended = True
        self._end()
        self._ucx.cancel_inflight_requests(_CLOSE_NS)
        self._work()
        self._ucx = None  # frees its ports

    def _work(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._ucx.progress()
        self._take_in()
        self._settle()

    def _next_timeout_s(self) -> float | None:
        """Gives up peers that do not answer; how long to wait for the others."""
        connecting = [peer for peer in list(self._peers.values()) if peer.obstacle == "connecting"]
        for peer in connecting:
            if peer.connects_until <= time.monotonic():
                self._lose(peer)
        return CONNECT_TIMEOUT_S if connecting else None

    def _end(self) -> None:
        self._open = False
        for stream in list(self._kept):
            self._close_stream(stream)
        for peer in list(self._peers.values()):
            self._lose(peer)

    def _connect(self, peer: Peer) -> None:
        """UCX connects with the first message, so one is sent."""
        if not self._open:
            self._forget(peer)
            return
        try:
            address = self._api.UCXAddress.create_from_buffer(peer.address)
            peer.endpoint = self._ucx.create_endpoint_from_worker_address(address, endpoint_error_handling=True)
            # Called while UCX makes progress, where the endpoint cannot be closed.
            peer.endpoint.set_close_callback(lambda: self._commands.append(lambda: self._lose(peer)))
        except self._api.UCXError:
            self._forget(peer)
            return
        peer.connects_until = time.monotonic() + CONNECT_TIMEOUT_S
        hello: Future[None] = Future()
        hello.add_done_callback(lambda hello: self._connected(peer, hello))
        self._send(peer, np.zeros(1, np.uint8), _HELLO_TAG, hello)

    def _connected(self, peer: Peer, hello: Future[None]) -> None:
        if hello.exception():
            self._lose(peer)
        else:
            peer.obstacle = ""

    def _forget(self, peer: Peer) -> None:
        """Lets the next request for this address connect anew."""
        peer.obstacle = "unreachable"
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]

    def _lose(self, peer: Peer) -> None:
        self._forget(peer)
        endpoint, peer.endpoint = peer.endpoint, None
        if endpoint is not None:
            endpoint.remove_close_callback()
            endpoint.close_blocking(_CLOSE_NS, 1)

    def _send(self, peer: Peer, data: np.ndarray, tag: int, done: Future[None]) -> None:
        if peer.endpoint is None:
            done.set_exception(Unavailable("UCX: not connected"))
            return
        try:
            request = peer.endpoint.tag_send(self._array(data), self._api.UCXXTag(tag))
        except self._api.UCXError as error:
            done.set_exception(_unavailable(error))
        else:
            self._running.append((request, done, None, data))

    def _take_in(self) -> None:
        """Empties UCX's queue, where a message that nobody wants would stay."""
        while (message := self._ucx.tag_probe(*self._all_tags, remove=True)).matched:
            tag = message.sender_tag.value
            kept = self._kept.get(tag >> TAG_BITS)
            if wanted := self._wanted.pop(tag, None):
                self._receive(message, wanted)
            elif kept is None or tag in kept or len(kept) >= MOST_KEPT:
                self._refuse(message)
            else:
                kept[tag] = message

    def _want(self, tag: int, wanted: _Wanted) -> None:
        kept = self._kept.get(tag >> TAG_BITS)
        if kept is None:
            wanted.future.set_exception(_left())
        elif message := kept.pop(tag, None):
            self._receive(message, wanted)
        else:
            self._wanted[tag] = wanted

    def _close_stream(self, stream: int) -> None:
        for message in self._kept.pop(stream, {}).values():
            self._refuse(message)
        for tag in [tag for tag in self._wanted if tag >> TAG_BITS == stream]:
            self._wanted.pop(tag).future.set_exception(_left())

    def _receive(self, message: Any, wanted: _Wanted) -> None:
        if message.length != wanted.size_bytes:
            self._refuse(message)
            wanted.future.set_exception(ValueError(f"{message.length} bytes came, not {wanted.size_bytes}"))
            return
        try:
            data = np.empty(wanted.size_bytes, np.uint8)
        except MemoryError:
            self._refuse(message)
            wanted.future.set_exception(Unavailable(f"UCX: no memory for {wanted.size_bytes} bytes"))
            return
        request = self._ucx.tag_recv_with_handle(self._array(data), message)
        self._running.append((request, wanted.future, data, data))

    def _refuse(self, message: Any) -> None:
        """Receives a message into too little room: UCX sends none of a large one, and tells its sender it is done."""
        self._running.append((self._ucx.tag_recv_with_handle(self._refused, message), Future(), None, None))

    def _settle(self) -> None:
        completed = [entry for entry in self._running if entry[0].completed]
        self._running = [entry for entry in self._running if not entry[0].completed]
        for request, done, result, _ in completed:
            try:
                request.check_error()
            except self._api.UCXError as error:
                done.set_exception(_unavailable(error))
            else:
                done.set_result(result)


def _unavailable(error: Exception) -> Unavailable:
    return Unavailable(f"UCX: {str(error) or type(error).__name__}")


def _left() -> Unavailable:
    return Unavailable("UCX: the stream was left")
