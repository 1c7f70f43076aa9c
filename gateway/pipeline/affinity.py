"""Which conversations begin alike: a thinker that has read one has the beginning of the other in its prefix cache."""

import hashlib

from gateway.pipeline.job import Job
from quartet.v1 import media_pb2

# Of a text or file so many characters or bytes of its beginning and end are looked at: a clash costs a cache miss.
_LOOKED_AT = 16 * 1024


def prefix_key(job: Job) -> bytes:
    """Digest of what the prompt begins with: tools, template and the messages up to the user's first.

    So all turns of a conversation have one key, while conversations that share a system prompt alone are spread: each
    replica soon has that one cached.
    """
    start = job.start
    digest = hashlib.blake2b(digest_size=16)
    late = iter(job.late_media)
    _add(digest, start.chat_template_kwargs_json)
    for tool in start.tools:
        _add(digest, f"{tool.name}\0{tool.description}\0{tool.parameters_json}")
    for message in start.messages:
        _add(digest, message.role)
        for part in message.content:
            if part.WhichOneof("content") == "media":
                _add(digest, part.media.data if _is_inline(part.media) else next(late, b""))
            else:
                _add(digest, part.text)
        if message.role == "user":
            break
    return digest.digest()


def _is_inline(media: media_pb2.Media) -> bool:
    return bool(media.data) or not media.size_bytes


def _add(digest: "hashlib.blake2b", content: bytes | str) -> None:
    for piece in (content[:_LOOKED_AT], content[max(_LOOKED_AT, len(content) - _LOOKED_AT) :]):
        digest.update(piece.encode() if isinstance(piece, str) else piece)
    digest.update(len(content).to_bytes(8, "little"))
