"""Chooses one of a stage's replicas."""

import hashlib
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

# By how many requests the preferred replica may be ahead of the least loaded one, the new one counted.
MAX_IMBALANCE = 2


class Candidate(Protocol):
    """A replica that could take a request."""

    address: str
    last_chosen: int

    @property
    def load(self) -> int:
        """Requests it runs and queues."""
        ...


Chosen = TypeVar("Chosen", bound=Candidate)


def by_load(replicas: Sequence[Chosen]) -> Chosen:
    """The less loaded of two replicas picked at random; of equals the one not used for longer.

    Two are as good as all for the queues' length, and gateways that do not know of each other's choices do not all send
    their next request to the same one.
    """
    two = random.sample(replicas, 2) if len(replicas) > 2 else replicas
    return min(two, key=lambda replica: (replica.load, replica.last_chosen))


def by_key(key: bytes, replicas: Sequence[Chosen], max_imbalance: int = MAX_IMBALANCE) -> Chosen:
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
