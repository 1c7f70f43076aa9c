"""The API keys of a gateway, read again when their file changes."""

import asyncio
import hmac
from dataclasses import dataclass
from pathlib import Path

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.key_file import ApiKeyEntry, digest, read_key_file
from gateway.access.usage import Usage
from gateway.openai.errors import ApiError
from gateway.pipeline.yaml_source import YamlError
from services.common.rpc.file_version import file_version

CHECK_INTERVAL_S = 1.0
# For probes, Prometheus and `quartet top`; the API's description is the same everywhere. An Ingress leaves them inside.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/docs", "/openapi.json"})
_POLICY_VIOLATION = 1008  # a WebSocket's close code

log = structlog.get_logger()


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
