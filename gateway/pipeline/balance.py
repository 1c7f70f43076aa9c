"""Choice of a replica: by load, or by the prompt that it may have cached."""

import hashlib
import random
from collections.abc import Sequence

from gateway.pipeline.replica import Replica
from quartet.v1 import thinker_pb2

# By how many requests the preferred replica may be ahead of the least loaded one, the new one counted. More trades
# even queues for cache hits. Of many busy replicas the least loaded one is always far below the mean, so the preferred
# one may also have as many requests as _MAX_TIMES_MEAN of the others: chance alone then sends few elsewhere.
_MAX_IMBALANCE = 2
_MAX_TIMES_MEAN = 2
# Of a text or file so many characters or bytes of its beginning and end are looked at: a clash costs a cache miss.
_LOOKED_AT = 16 * 1024
_RAW_BEGINNING = 256  # characters or ids of a prompt that has no messages: those that begin alike go together


def power_of_two(replicas: Sequence[Replica]) -> Replica:
    """The less loaded of two random replicas; of equals, the least recently chosen one.

    Two keep queues as short as all do, and several gateways do not choose the same replica."""
    two = random.sample(replicas, 2) if len(replicas) > 2 else replicas
    return min(two, key=lambda replica: (replica.load, replica.last_chosen))


def rendezvous(key: bytes, replicas: Sequence[Replica]) -> Replica:
    """The replica that `key`, of what may be cached, prefers (rendezvous hashing) among those with room.

    All processes have one order of preference. A replica that comes or goes changes its own keys alone."""
    loads = [replica.load for replica in replicas]
    least, total, others = min(loads), sum(loads), max(1, len(loads) - 1)

    def has_room(load: int) -> bool:
        return load + 1 <= max(least + _MAX_IMBALANCE, _MAX_TIMES_MEAN * (total - load) / others)

    return preferred(key, [replica for replica, load in zip(replicas, loads, strict=True) if has_room(load)])


def preferred(key: bytes, replicas: Sequence[Replica]) -> Replica:
    return max(replicas, key=lambda replica: _score(key, replica.address))


def _score(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(address.encode(), key=key[:64], digest_size=8).digest()


def prompt_key(start: thinker_pb2.GenerateStart, media: Sequence[bytes]) -> bytes:
    """Digest of tools, template and the messages up to the first user message: one for all turns of a conversation.

    `media` are the files of the media in `start` that have no data, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    late = iter(media)
    _add(digest, start.lora)
    _add(digest, start.chat_template_kwargs_json)
    for tool in start.tools:
        _add(digest, f"{tool.name}\0{tool.description}\0{tool.parameters_json}")
    _add(digest, start.prompt.text[:_RAW_BEGINNING])
    _add(digest, repr(start.prompt.token_ids.ids[:_RAW_BEGINNING]))
    for message in start.messages:
        _add(digest, message.role)
        for part in message.content:
            if part.WhichOneof("content") == "media":
                is_late = part.media.size_bytes and not part.media.data
                _add(digest, next(late, b"") if is_late else part.media.data)
            else:
                _add(digest, part.text)
        if message.role == "user":
            break
    return digest.digest()


def _add(digest: "hashlib.blake2b", content: bytes | str) -> None:
    for piece in (content[:_LOOKED_AT], content[max(_LOOKED_AT, len(content) - _LOOKED_AT) :]):
        digest.update(piece.encode() if isinstance(piece, str) else piece)
    digest.update(len(content).to_bytes(8, "little"))
