"""The API keys of a gateway, read again when their file changes, and what their requests take of their limits."""

import asyncio
import hmac
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import metrics
from gateway.access.key_file import ApiKeyEntry, digest, read_key_file
from gateway.errors import ApiError
from gateway.strict import YamlError
from services.common.rpc.tls import file_version

CHECK_INTERVAL_S = 1.0
# For probes, Prometheus and `quartet top`; the API's description is the same everywhere. An Ingress leaves them inside.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/docs", "/openapi.json"})
_POLICY_VIOLATION = 1008  # a WebSocket's close code
LIMITS = ("concurrency", "rate")
_WINDOW_S = 60.0
_RETRY_S = 1.0  # when a place will be free is not known

log = structlog.get_logger()


class Place:
    """A request's place among those that its key may have at a time.

    Attributes:
        kept: whether it is held beyond the request, by what the request started.
    """

    def __init__(self, usage: "Usage") -> None:
        self.kept = False
        self._usage: Usage | None = usage

    def release(self) -> None:
        """The place is free. May be called again."""
        if self._usage is not None:
            self._usage.release()
            self._usage = None


class Usage:
    """The requests of the key `name`, whatever its entry becomes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._running = 0
        self._admitted_s: deque[float] = deque()
        self._running_metric = metrics.KEY_RUNNING.labels(name)

    @contextmanager
    def request(self, entry: ApiKeyEntry) -> Iterator[Place]:
        """While a request is served, or for longer if its place is kept.

        Raises:
            ApiError: 429, a limit of `entry` is reached.
        """
        self._check_concurrency(entry)
        self._check_rate(entry)
        metrics.KEY_REQUESTS.labels(self.name).inc()
        self._running += 1
        self._running_metric.inc()
        place = Place(self)
        try:
            yield place
        finally:
            if not place.kept:
                place.release()

    def release(self) -> None:
        """For Place."""
        self._running -= 1
        self._running_metric.dec()

    def forget(self) -> None:
        """Removes the key's name from the metrics."""
        metrics.KEY_RUNNING.remove(self.name)
        for metric, labels in ((metrics.KEY_REQUESTS, ()), *((metrics.KEY_REFUSED, (which,)) for which in LIMITS)):
            with suppress(KeyError):
                metric.remove(self.name, *labels)

    def _check_concurrency(self, entry: ApiKeyEntry) -> None:
        most = entry.max_concurrent_requests
        if most is not None and self._running >= most:
            reason = f"has {self._running} requests in progress; it may have {most} at a time"
            raise self._refusal("concurrency", reason, _RETRY_S)

    def _check_rate(self, entry: ApiKeyEntry) -> None:
        """Counts the request if it may be made."""
        most, now = entry.requests_per_minute, time.monotonic()
        if most is None:
            self._admitted_s.clear()
            return
        while self._admitted_s and self._admitted_s[0] <= now - _WINDOW_S:
            self._admitted_s.popleft()
        if len(self._admitted_s) >= most:
            # of a limit that was lowered, more than one has to become old
            wait_s = self._admitted_s[-most] + _WINDOW_S - now
            raise self._refusal("rate", f"may make {most} requests a minute", wait_s)
        self._admitted_s.append(now)

    def _refusal(self, which: str, reason: str, retry_after_s: float) -> ApiError:
        metrics.KEY_REFUSED.labels(self.name, which).inc()
        message = f"the API key {self.name!r} {reason}; retry later"
        return ApiError(429, message, None, "rate_limit_exceeded", "rate_limit_error", math.ceil(retry_after_s))


@dataclass(frozen=True)
class ApiKey:
    """A key that may be used now, and what its requests take."""

    entry: ApiKeyEntry
    usage: Usage


class ApiKeys:
    """The keys in `file`. Use as `async with`: the file is watched meanwhile.

    Raises:
        YamlError: the file cannot be used. Later, when it has changed, that is logged, and the keys stay as they were.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen = file_version(file)
        self._keys: list[ApiKey] = []
        self._use(read_key_file(file))

    async def __aenter__(self) -> "ApiKeys":
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    def find(self, presented: str) -> ApiKey | None:
        """The key whose hash is that of `presented`. How long that takes says nothing of the hashes."""
        presented_digest, found = digest(presented), None
        for key in self._keys:
            if hmac.compare_digest(key.entry.sha256, presented_digest):
                found = key
        return found

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            seen = await asyncio.to_thread(file_version, self._file)
            if seen == self._seen:
                continue
            self._seen = seen
            try:
                self._use(await asyncio.to_thread(read_key_file, self._file))
            except YamlError as error:
                log.error("the changed API keys cannot be used; those before stay in use", error=str(error))
            else:
                log.info("API keys read again", keys=[key.entry.name for key in self._keys])

    def _use(self, entries: list[ApiKeyEntry]) -> None:
        before = {key.entry.name: key.usage for key in self._keys}
        self._keys = [ApiKey(entry, before.pop(entry.name, None) or Usage(entry.name)) for entry in entries]
        for usage in before.values():
            usage.forget()


class RequireKey:
    """Lets in who has a key, and sets `request.state.key`; answers others with 401.

    Args:
        app: what is protected, but for OPEN_PATHS.
        keys: those that are known.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        presented = _bearer(Headers(scope=scope).get("authorization", ""))
        key = self._keys.find(presented) if presented else None
        if key is not None:
            state = scope.setdefault("state", {})
            state["key"] = key
            state.setdefault("log", {})["key"] = key.entry.name
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await _refuse(presented, scope, receive, send)


async def _refuse(presented: str, scope: Scope, receive: Receive, send: Send) -> None:
    reason = "the API key is not known here" if presented else "an API key is required"
    message = f"{reason}; send `Authorization: Bearer KEY` with one that this server's operator gave out"
    error = ApiError(401, message, None, "invalid_api_key")
    scope.get("state", {}).get("log", {})["code"] = error.code
    response = error.response()
    response.headers["www-authenticate"] = "Bearer"
    await response(scope, receive, send)


def _bearer(header: str) -> str:
    scheme, _, credentials = header.partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else ""
