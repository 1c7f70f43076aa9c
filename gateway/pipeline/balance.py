"""Which of a stage's replicas a request goes to: the less loaded, or the one that may have its prompt cached."""

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
    """A replica that could take a request."""

    address: str
    last_chosen: int

    @property
    def load(self) -> int:
        """Requests it runs and queues."""
        ...


Chosen = TypeVar("Chosen", bound=Candidate)


def power_of_two(replicas: Sequence[Chosen]) -> Chosen:
    """The less loaded of two replicas picked at random; of equals the one not used for longer.

    Comparing two keeps the queues as short as comparing all, and gateways that do not know of each other's choices do
    not all send their next request to the same one.
    """
    two = random.sample(replicas, 2) if len(replicas) > 2 else replicas
    return min(two, key=lambda replica: (replica.load, replica.last_chosen))


def rendezvous(key: bytes, replicas: Sequence[Chosen], max_imbalance: int = MAX_IMBALANCE) -> Chosen:
    """The replica that `key` prefers, or the next in its order of preference that is not much more loaded than the
    least loaded one.

    The order (rendezvous hashing) is the same in every gateway and process. When replicas come or go, only the keys
    change their preference that prefer these.

    Args:
        key: names what the replicas may have cached.
        replicas: at least one.
        max_imbalance: by how many requests a replica may be ahead of the least loaded one, the new one counted; from 1.
    """
    most = min(replica.load for replica in replicas) + max_imbalance - 1
    fitting = [replica for replica in replicas if replica.load <= most]
    return max(fitting, key=lambda replica: _score(key, replica.address))


def preferred(key: bytes, replicas: Sequence[Chosen]) -> Chosen:
    """The replica that `key` prefers, whatever its load."""
    return max(replicas, key=lambda replica: _score(key, replica.address))


def _score(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(address.encode(), key=key[:64], digest_size=8).digest()


def prompt_key(start: thinker_pb2.GenerateStart, media: Sequence[bytes]) -> bytes:
    """Digest of what the prompt begins with: tools, template and the messages up to the user's first.

    A thinker that has read a prompt has the beginning of others with the same key in its prefix cache. All turns of a
    conversation have one key. Conversations that share a system prompt alone are spread: each replica soon has that
    one cached.

    Args:
        start: what a thinker gets.
        media: files of its media parts without data, in their order.
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
