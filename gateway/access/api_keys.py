"""API keys: their file and their limits."""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import structlog
from pydantic import BeforeValidator

from gateway import metrics
from gateway.access.api_key import ApiKey, ApiKeyEntry
from gateway.access.shared import SharedState
from gateway.validation import Strict
from gateway.yaml_source import YamlError, YamlSource, read_yaml
from services.common.rpc.tls import file_version

CHECK_INTERVAL_S = 1.0
PREFIX = "sk-quartet-"
_RANDOM_BYTES = 32

log = structlog.get_logger()


class ApiKeyFile(Strict):
    """Without entries, e.g. after the last one was removed, nobody gets in."""

    keys: Annotated[list[ApiKeyEntry], BeforeValidator(lambda value: [] if value is None else value)]


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest(key: str) -> str:
    """SHA-256, hexadecimal: nobody can guess 256 random bits, so no slow salted hash is needed."""
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).hexdigest()


def bearer_of(headers: Mapping[str, str]) -> str:
    """The Authorization header's key, or ""."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else ""


def key_in(headers: Mapping[str, str]) -> str:
    """The key of an HTTP request, or "": in Authorization, in `x-api-key` of Anthropic's clients, in `api-key` of
    Azure's."""
    return bearer_of(headers) or headers.get("x-api-key", "").strip() or headers.get("api-key", "").strip()


def read_key_file(file: Path) -> list[ApiKeyEntry]:
    """Raises YamlError, which repeats no hash."""
    source = read_yaml(file, "key `keys`, a list of what `quartet key` prints")
    entries = source.parse(ApiKeyFile, _explain).keys
    _check_unique(source, entries)
    return entries


def _explain(error: Any) -> str:
    path = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown; an entry has {', '.join(ApiKeyEntry.model_fields)}"
    if error["loc"][-1:] == ("sha256",) and error["type"] != "missing":
        return f"{path}: must be 64 hexadecimal digits, in quotes: the key's hash as `quartet key` prints it"
    if error["loc"][-1:] == ("name",) and error["type"] == "string_pattern_mismatch":
        return f"{path}: must be 1 to 64 letters, digits or . _ -"
    return f"{path}: {error['msg']}"


def _check_unique(source: YamlSource, entries: list[ApiKeyEntry]) -> None:
    for field in ("name", "sha256"):
        seen: dict[str, int] = {}
        for index, entry in enumerate(entries):
            first = seen.setdefault(getattr(entry, field), index)
            if first != index:
                what = f"keys.{index}.{field}: is that of keys.{first} too; each key has its own"
                raise source.error(("keys", index, field), what)


class ApiKeys:
    """The keys of a file. Raises YamlError: it cannot be used."""

    def __init__(self, file: Path, shared: SharedState | None = None) -> None:
        self._file, self._shared = file, shared or SharedState()
        self._seen = file_version(file)
        self._keys: list[ApiKey] = []
        self._use(read_key_file(file))

    def find(self, presented: str) -> ApiKey | None:
        """Runs in constant time."""
        presented_digest, found = digest(presented), None
        for key in self._keys:
            if hmac.compare_digest(key.entry.sha256, presented_digest):
                found = key
        return found

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys)

    def named(self, name: str) -> ApiKey | None:
        return next((key for key in self._keys if key.name == name), None)

    async def watch(self) -> None:
        """Reads the file again whenever it has changed. A fault is logged, and the keys stay."""
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
                log.info("API keys read again", keys=[key.name for key in self._keys])

    def _use(self, entries: list[ApiKeyEntry]) -> None:
        before = {(key.name, key.entry.sha256): key for key in self._keys}
        known = [before.pop((entry.name, entry.sha256), None) or ApiKey(entry, self._shared) for entry in entries]
        for key, entry in zip(known, entries, strict=True):
            key.entry = entry
        for (name, _), key in before.items():
            key.end()
            if name not in {entry.name for entry in entries}:
                metrics.forget_key(name)
        self._keys = known
