"""Choice of a replica: by load, or by the prompt that it may have cached."""

import hashlib
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from quartet.v1 import thinker_pb2

# By how many requests the preferred replica may be ahead of the least loaded one, the new one counted.
MAX_IMBALANCE = 2
# Of a text or file so many characters or bytes of its beginning and end are looked at: a clash costs a cache miss.
_LOOKED_AT = 16 * 1024
_RAW_BEGINNING = 256  # characters or ids of a prompt that has no messages: those that begin alike go together


class Candidate(Protocol):
    address: str
    last_chosen: int

    @property
    def load(self) -> int: ...


Chosen = TypeVar("Chosen", bound=Candidate)


def power_of_two(replicas: Sequence[Chosen]) -> Chosen:
    """The less loaded of two random replicas, or the least recently chosen one if their loads are equal.

    Comparing two keeps queues as short as comparing all, and several gateways do not choose the same replica.
    """
    two = random.sample(replicas, 2) if len(replicas) > 2 else replicas
    return min(two, key=lambda replica: (replica.load, replica.last_chosen))


def rendezvous(key: bytes, replicas: Sequence[Chosen], max_imbalance: int = MAX_IMBALANCE) -> Chosen:
    """The first replica, in the key's order of preference, that is not much more loaded than the least loaded one.

    The order (rendezvous hashing) is the same in every process, and a replica that comes or goes changes its own keys
    alone.

    Args:
        key: names what replicas may have cached.
        max_imbalance: requests that a replica may be ahead of the least loaded one, counting the new one.
    """
    most = min(replica.load for replica in replicas) + max_imbalance - 1
    fitting = [replica for replica in replicas if replica.load <= most]
    return max(fitting, key=lambda replica: _score(key, replica.address))


def preferred(key: bytes, replicas: Sequence[Chosen]) -> Chosen:
    return max(replicas, key=lambda replica: _score(key, replica.address))


def _score(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(address.encode(), key=key[:64], digest_size=8).digest()


def prompt_key(start: thinker_pb2.GenerateStart, media: Sequence[bytes]) -> bytes:
    """Digest of a prompt's beginning: tools, template and the messages up to the first user message.

    All turns of a conversation have one key. Conversations that share a system prompt alone do not.

    Args:
        media: files of the media in `start` that have no data, in their order.
    """
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
