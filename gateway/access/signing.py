"""Signatures of what clients keep for gateways: each gateway that has the key knows what another one made."""

import hmac
import secrets
from pathlib import Path

from gateway.access.shared import SharedState

SIGNATURE_BYTES = 32
_LEAST_KEY_BYTES, _MOST_KEY_BYTES = 32, 4096
_MAKE_ONE = "make one by `openssl rand -hex 32 > FILE`, and give every gateway the same"
_KEPT_AS = "signing key"


class SigningKeyError(Exception):
    """Says why the file cannot be used, and what to do."""


class Signer:
    """HMAC-SHA256 by one key. A signature for one purpose is none for another."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, purpose: str, message: bytes) -> bytes:
        """SIGNATURE_BYTES. `purpose`: without a zero byte, which divides it from the message."""
        return hmac.digest(self._key, purpose.encode() + b"\0" + message, "sha256")

    def is_signed(self, purpose: str, message: bytes, signature: bytes) -> bool:
        """Runs in constant time."""
        return hmac.compare_digest(self.sign(purpose, message), signature)


def load(file: Path | None, shared: SharedState) -> Signer:
    """By the key in `file`; without one, by a random key of the gateway, the same in all its workers.

    Raises:
        SigningKeyError: the file cannot be used.
    """
    if file is not None:
        return Signer(read_signing_key(file))
    return Signer(shared.keep(_KEPT_AS, secrets.token_bytes(_LEAST_KEY_BYTES)))


def read_signing_key(file: Path) -> bytes:
    """All bytes of the file, its last newline too: they may be random ones. Raises SigningKeyError."""
    try:
        with file.open("rb") as opened:
            key = opened.read(_MOST_KEY_BYTES + 1)
    except OSError as error:
        raise SigningKeyError(f"--signing-key-file: {file}: {error.strerror}; {_MAKE_ONE}") from None
    if len(key) < _LEAST_KEY_BYTES:
        reason = f"has {len(key)} bytes, fewer than {_LEAST_KEY_BYTES}"
    elif len(key) > _MOST_KEY_BYTES:
        reason = f"has more than {_MOST_KEY_BYTES} bytes"
    else:
        return key
    raise SigningKeyError(f"--signing-key-file: {file} {reason}; {_MAKE_ONE}")
