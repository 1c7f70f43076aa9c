"""The text of a client secret, which has all that a gateway must know of it, and a signature.

Whoever has the text can read its session, as in the first event of the session that it opens, and change nothing.
"""

import base64
import secrets
import struct
import zlib
from dataclasses import dataclass

from gateway.access.signing import SIGNATURE_BYTES, Signer

PREFIX = "ek_"
MAX_CHARACTERS = 4096  # proxies take 8 KiB of headers, WebSocket servers as much of one
MAX_SESSION_BYTES = 256 * 1024  # of one session, as JSON
# Of an HMAC: no other API key of a file has the same by chance, and nobody can look for one without the signing key.
# The hash of the API key itself would give a key that somebody has invented to who tries them all.
REFERENCE_BYTES = 16
_NONCE_BYTES = 16  # no two secrets are alike
_HEAD = struct.Struct(f">BQ{_NONCE_BYTES}s{REFERENCE_BYTES}s")
_WITH_SESSION, _SESSION_KEPT = 1, 2  # what follows the head; a later form has another number
_MAX_PACKED_BYTES = (MAX_CHARACTERS - len(PREFIX)) * 3 // 4 - _HEAD.size - SIGNATURE_BYTES
_PIECE_BYTES = 16 * 1024
_RAW_DEFLATE = -15  # zlib's name for it
_TEXT, _REFERENCE = "client secret", "API key of a client secret"  # purposes of signatures


@dataclass(frozen=True)
class SecretClaims:
    """What a text says.

    Attributes:
        expires_at: Unix time in seconds.
        key_reference: REFERENCE_BYTES, of the API key that made it.
        session_json: members of the session; None: the gateway that made the secret has them.
    """

    expires_at: int
    key_reference: bytes
    session_json: bytes | None


class SecretTexts:
    """Texts that `signer` has signed."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    def reference(self, key_sha256: str) -> bytes:
        """What a text has of an API key."""
        return self._signer.sign(_REFERENCE, key_sha256.encode())[:REFERENCE_BYTES]

    def write(self, expires_at: int, key_reference: bytes, session_json: bytes) -> tuple[str, bool]:
        """(text, whether the session is in it): one that makes the text too long is not."""
        packed = _pack(session_json)
        form = _SESSION_KEPT if packed is None else _WITH_SESSION
        head = _HEAD.pack(form, expires_at, secrets.token_bytes(_NONCE_BYTES), key_reference)
        signed = head + (packed or b"")
        return PREFIX + _characters(signed + self._signer.sign(_TEXT, signed)), packed is not None

    def read(self, text: str) -> SecretClaims | None:
        """None: `text` is none that was signed here, or was changed."""
        if not text.startswith(PREFIX) or len(text) > MAX_CHARACTERS:
            return None
        everything = _bytes(text.removeprefix(PREFIX))
        if everything is None or len(everything) < _HEAD.size + SIGNATURE_BYTES:
            return None
        signed, signature = everything[:-SIGNATURE_BYTES], everything[-SIGNATURE_BYTES:]
        if not self._signer.is_signed(_TEXT, signed, signature):
            return None
        form, expires_at, _, key_reference = _HEAD.unpack_from(signed)
        if form == _SESSION_KEPT:
            return SecretClaims(expires_at, key_reference, None)
        session_json = _unpack(signed[_HEAD.size :]) if form == _WITH_SESSION else None
        return None if session_json is None else SecretClaims(expires_at, key_reference, session_json)


def _characters(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(characters: str) -> bytes | None:
    """None: there are others than base64url has, or another text for the same bytes would be right."""
    try:
        data = base64.urlsafe_b64decode(characters + "=" * (-len(characters) % 4))
    except ValueError:
        return None
    return data if _characters(data) == characters else None


def _pack(session_json: bytes) -> bytes | None:
    """None: it has more than _MAX_PACKED_BYTES. That is found early: packing the rest could take 60 ms."""
    packer, packed = zlib.compressobj(wbits=_RAW_DEFLATE), b""
    for begin in range(0, len(session_json), _PIECE_BYTES):
        packed += packer.compress(session_json[begin : begin + _PIECE_BYTES])
        if len(packed) > _MAX_PACKED_BYTES:
            return None
    packed += packer.flush()
    return packed if len(packed) <= _MAX_PACKED_BYTES else None


def _unpack(packed: bytes) -> bytes | None:
    """None: it is no deflated session, or a larger one than any may be."""
    unpacker = zlib.decompressobj(wbits=_RAW_DEFLATE)
    try:
        session_json = unpacker.decompress(packed, MAX_SESSION_BYTES + 1)
    except zlib.error:
        return None
    is_whole = unpacker.eof and not unpacker.unused_data and len(session_json) <= MAX_SESSION_BYTES
    return session_json if is_whole else None
