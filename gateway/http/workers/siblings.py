"""What the workers of a gateway tell each other, by their sockets."""

import asyncio
import fcntl
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.workers.worker import Worker

Handler = Callable[[Any], Awaitable[Any]]
"""Takes and returns what JSON can say."""

_PATH = "/workers/"
_SECRET = b"x-quartet-worker"
_CONNECT_S, _TOLD_S = 5.0, 60.0
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
        """Has `handler` take what others `tell` by that name."""
        self._handlers[name] = handler

    async def tell(self, name: str, what: Any) -> list[Any]:
        """What the handlers of all others return; those that cannot be reached are left out: they start anew."""
        if self._worker is None:
            return []
        headers = [(_SECRET, self._worker.secret.encode())]
        others = [number for number in range(self._worker.count) if number != self._worker.number]
        sent = {"content": orjson.dumps(what), "timeout": _TOLD_S}
        answers = await self._ask(others, "POST", _PATH + name, headers, **sent)
        for number, answer in answers:
            if answer.status_code != 200:
                log.error("a worker did not do what another one told it", worker=number, told=name)
        return [orjson.loads(answer.body) for _, answer in answers if answer.status_code == 200]

    async def ask_all(
        self, method: str, target: str, headers: Sequence[tuple[bytes, bytes]]
    ) -> list[tuple[int, Response]]:
        """(number, answer) of every worker that can be reached to a client's request, this one among them."""
        return [] if self._worker is None else await self._ask(range(self._worker.count), method, target, headers)

    async def _ask(
        self, numbers: Iterable[int], method: str, target: str, headers: Sequence[tuple[bytes, bytes]], **sent: Any
    ) -> list[tuple[int, Response]]:
        async def ask(number: int) -> tuple[int, Response] | None:
            try:
                answer = await self._to(number).request(method, target, headers=headers, **sent)
            except httpx.TransportError:
                return None
            return number, Response(answer.content, answer.status_code, dict(answer.headers))

        answers = await asyncio.gather(*map(ask, numbers))
        return [answer for answer in answers if answer is not None]

    def _to(self, number: int) -> httpx.AsyncClient:
        assert self._worker is not None
        if number not in self._clients:
            transport = httpx.AsyncHTTPTransport(uds=str(self._worker.socket_of(number)), limits=_LIMITS)
            timeout = httpx.Timeout(None, connect=_CONNECT_S)
            self._clients[number] = httpx.AsyncClient(base_url="http://worker", transport=transport, timeout=timeout)
        return self._clients[number]

    def tells(self, scope: Scope) -> bool:
        """Whether a request is what another worker tells this one: only they have the secret."""
        if self._worker is None or scope["type"] != "http" or not scope["path"].startswith(_PATH):
            return False
        secret = next((value for name, value in scope["headers"] if name == _SECRET), b"")
        return hmac.compare_digest(secret, self._worker.secret.encode())

    async def hear(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers such a request."""
        handler = self._handlers[scope["path"].removeprefix(_PATH)]
        answer = await handler(orjson.loads(await Request(scope, receive).body()))
        await Response(orjson.dumps(answer), media_type="application/json")(scope, receive, send)

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
