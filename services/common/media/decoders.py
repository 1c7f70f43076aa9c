"""Decoding in processes that have limits of memory and time, and end when nobody waits for them."""

import asyncio
import contextlib
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar

from services.common.engine.forking import HELLO, ForkServer
from services.common.errors import InternalError, RequestCancelled
from services.common.media import MediaError
from services.common.media.wire import Wire

Result = TypeVar("Result")
_MOST_IDLE = 8
_POLL_S = 0.1
_START_S = 300.0
_DEATH_S = 0.1
_MODULE = "services.common.media.decoding_process"


class Decoders:
    """Processes, of which some are kept for the next request. For any thread.

    Args:
        memory_bytes: that one may take.
        limit_s: time of a call.
    """

    def __init__(self, memory_bytes: int, limit_s: float) -> None:
        # numpy computes nothing here that is worth threads, and a process that has some forks slowly
        self.server = ForkServer([sys.executable, "-m", _MODULE, str(memory_bytes)], OPENBLAS_NUM_THREADS="1")
        self._limit_s = limit_s
        self._idle: list[DecoderProcess] = []

    @contextlib.contextmanager
    def lend(self, stop: Callable[[], bool]) -> Iterator["DecoderProcess"]:
        """A process for the files of a request. It is killed if a call has not come to its end.

        Args:
            stop: says whether nobody waits any more; called often.
        """
        decoder = self._take()
        decoder.stop = stop
        try:
            yield decoder
        finally:
            if decoder.forget():
                self._idle.append(decoder) if len(self._idle) < _MOST_IDLE else decoder.close()

    async def run(self, threads: Executor | None, call: Callable[..., Result], *arguments: Any) -> Result:
        """What `call` returns in one of `threads`; its last argument is a `Read`. Cancelling ends the process."""
        gone = threading.Event()

        def work() -> Result:
            with self.lend(gone.is_set) as read:
                return call(*arguments, read)

        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        finally:
            gone.set()

    def _take(self) -> "DecoderProcess":
        with contextlib.suppress(IndexError):  # none is idle
            while True:
                decoder = self._idle.pop()
                if decoder.is_ready():
                    return decoder
                decoder.close()
        return DecoderProcess(self.server, self._limit_s)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        self.server.close()


class DecoderProcess:
    """A `Read`: see `calls`. Raises also MediaError: the file took too much memory or time, or its decoder crashed;
    RequestCancelled; InternalError: the process cannot start, or its program is at fault.

    Attributes:
        stop: as of `Decoders.lend`.
    """

    def __init__(self, server: ForkServer, limit_s: float) -> None:
        self._server, self._limit_s = server, limit_s
        self._connection = server.connect()
        self._connection.settimeout(_POLL_S)
        self._wire = Wire(self._connection, self._check)
        self._has_begun, self._is_busy = False, False
        self._files: dict[int, tuple[int, bytes]] = {}  # by identity: its number
        self._deadline = 0.0
        self.stop: Callable[[], bool] = lambda: False

    def __call__(self, name: str, data: bytes, *arguments: Any) -> Iterator[Any]:
        self._is_busy = True
        try:
            if not self._has_begun:
                self._begin()
            self._deadline = time.monotonic() + self._limit_s
            index, _ = self._files.get(id(data), (len(self._files), data))
            is_new = id(data) not in self._files
            self._files[id(data)] = index, data
            self._wire.send([name, index, *arguments], data if is_new else b"")
            yield from self._results()
        except EOFError:
            if not self._server.runs(_DEATH_S):
                raise InternalError("the process that decodes media has died") from None
            raise MediaError(
                "its decoder crashed, or took more memory than there is for it: check the file, or make it smaller"
            ) from None
        except TimeoutError:
            raise MediaError(f"takes longer than {self._limit_s:g} s to decode: make it smaller") from None

    def _results(self) -> Iterator[Any]:
        while True:
            head, payload = self._wire.receive()
            if "value" in head:
                yield head["value"]
            elif "shape" in head:
                yield payload.view(head["type"]).reshape(head["shape"])
            else:
                break
        self._is_busy = False
        if "error" in head:
            raise MediaError(head["error"])
        if "fault" in head:
            raise InternalError(f"decoding failed: {head['fault']}")

    def _begin(self) -> None:
        self._deadline = time.monotonic() + _START_S
        try:
            if bytes(self._wire.read(len(HELLO))) == HELLO:
                self._has_begun = True
        except (EOFError, TimeoutError):
            raise InternalError("the process that decodes media does not start") from None

    def _check(self) -> None:
        if self.stop():
            raise RequestCancelled("nobody waits for the media any more")
        if time.monotonic() > self._deadline:
            raise TimeoutError

    def is_ready(self) -> bool:
        """Whether the process is there for a next request."""
        waiting = select.poll()  # unlike `select`, for any descriptor
        waiting.register(self._connection, select.POLLIN)
        return not waiting.poll(0)

    def forget(self) -> bool:
        """Ends a request. Returns whether the process can be used for another one; else it is killed."""
        self._files.clear()
        self.stop, self._deadline = (lambda: False), time.monotonic() + _POLL_S
        with contextlib.suppress(EOFError, TimeoutError):
            if not self._is_busy:
                self._wire.send([])
                return True
        self.close()
        return False

    def close(self) -> None:
        self._connection.close()
