"""Calls from worker to worker of a gateway, by their sockets."""

import asyncio
import fcntl
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import structlog

from gateway.workers.worker import Worker

Handler = Callable[[Any], Awaitable[Any]]
"""Takes and returns JSON's values."""

PATH = "/workers/"
"""Their calls are below this path."""
SECRET = "x-quartet-worker"
"""The header with their secret."""
_CONNECT_S, _CALL_S = 5.0, 60.0
_TURN_AGAIN_S = 0.05
# Idle connections close before the other side closes them, after 5 s or more (keep_alive_s).
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)

log = structlog.get_logger()


class Siblings:
    """The other workers of this gateway.

    Args:
        worker: this one; None: there are no others.
    """

    def __init__(self, worker: Worker | None = None) -> None:
        self._worker = worker
        self._handlers: dict[str, Handler] = {}
        self._clients: dict[int, httpx.AsyncClient] = {}
        self._turn = asyncio.Lock()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    def on(self, name: str, handler: Handler) -> None:
        """Has `handler` answer the calls of others by that name."""
        self._handlers[name] = handler

    async def call_others(self, name: str, argument: Any) -> list[Any]:
        """What the handlers of all others return; those that cannot be reached are left out: they start anew."""
        if self._worker is None:
            return []
        headers = [(SECRET.encode(), self._worker.secret.encode())]
        others = [number for number in range(self._worker.count) if number != self._worker.number]
        sent = {"content": orjson.dumps(argument), "timeout": _CALL_S}
        answers = await self._ask(others, "POST", PATH + name, headers, **sent)
        for number, answer in answers:
            if answer.status_code != 200:
                log.error("a call to another worker failed", worker=number, call=name)
        return [orjson.loads(answer.content) for _, answer in answers if answer.status_code == 200]

    async def ask_all(
        self, method: str, target: str, headers: Sequence[tuple[bytes, bytes]]
    ) -> list[tuple[int, httpx.Response]]:
        """(number, answer) of every worker that can be reached to a client's request, this one among them."""
        return [] if self._worker is None else await self._ask(range(self._worker.count), method, target, headers)

    async def _ask(
        self, numbers: Iterable[int], method: str, target: str, headers: Sequence[tuple[bytes, bytes]], **sent: Any
    ) -> list[tuple[int, httpx.Response]]:
        async def ask(number: int) -> tuple[int, httpx.Response] | None:
            try:
                return number, await self._to(number).request(method, target, headers=headers, **sent)
            except httpx.TransportError:
                return None

        answers = await asyncio.gather(*map(ask, numbers))
        return [answer for answer in answers if answer is not None]

    def _to(self, number: int) -> httpx.AsyncClient:
        assert self._worker is not None
        if number not in self._clients:
            transport = httpx.AsyncHTTPTransport(uds=str(self._worker.socket_of(number)), limits=_LIMITS)
            timeout = httpx.Timeout(None, connect=_CONNECT_S)
            self._clients[number] = httpx.AsyncClient(base_url="http://worker", transport=transport, timeout=timeout)
        return self._clients[number]

    def knows(self, secret: str) -> bool:
        """Whether who has this `secret` is another worker."""
        return self._worker is not None and hmac.compare_digest(secret.encode(), self._worker.secret.encode())

    async def answer(self, name: str, argument: Any) -> Any:
        """What this worker's handler returns to another worker's call."""
        return await self._handlers[name](argument)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Only one request of all workers is in here."""
        async with self._turn:
            if self._worker is None:
                yield
                return
            with self._worker.lock_file.open("w") as lock:
                while True:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        await asyncio.sleep(_TURN_AGAIN_S)
                yield
