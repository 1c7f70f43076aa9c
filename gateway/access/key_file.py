"""The file of API keys: a name, a hash and limits each."""

import hashlib
import secrets
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from gateway.strict import Strict, YamlSource, read_yaml

PREFIX = "sk-quartet-"
_RANDOM_BYTES = 32
_MAX_REQUESTS_PER_MINUTE = 100_000  # the time of each is remembered for a minute


class ApiKeyEntry(Strict):
    """A key as the file has it."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = Field(
        description="in logs and metrics; letters, digits and . _ -"
    )
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] = Field(
        description="of the whole key, hexadecimal, as `quartet key` prints it"
    )
    max_concurrent_requests: int | None = Field(None, ge=1, description="requests at a time; default: no limit")
    requests_per_minute: int | None = Field(
        None, ge=1, le=_MAX_REQUESTS_PER_MINUTE, description="in any 60 seconds; default: no limit"
    )


class ApiKeyFile(Strict):
    """The whole file."""

    keys: list[ApiKeyEntry] = Field(min_length=1)


def new_key() -> str:
    """A key that nobody can guess: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest(key: str) -> str:
    """SHA-256 of a key, hexadecimal.

    Slow hashes with salt (bcrypt, argon2) are for what people make up: they keep the few likely passwords from being
    tried. 256 random bits cannot be tried out, whatever the hash, and this one is computed for each request.
    """
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).hexdigest()


def read_key_file(file: Path) -> list[ApiKeyEntry]:
    """The keys in `file`.

    Raises:
        YamlError: "FILE:LINE: what is wrong and how to fix it". What stands there for a hash is not repeated.
    """
    source = read_yaml(file)
    if not isinstance(source.data, dict):
        raise source.error((), "must be a mapping with the key `keys`, a list of what `quartet key` prints")
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
