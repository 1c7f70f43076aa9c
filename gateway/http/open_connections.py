"""The connections that are open, bounded for each address and in all."""

import ipaddress
import resource
from asyncio import Transport
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

_OTHER_FILES = 256  # of stages, media, stores and libraries


def with_files(wanted: int) -> int:
    """As many of `wanted` connections as this process may have open files for. It takes what the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _OTHER_FILES, soft * 3 // 4))


class _Connection(NamedTuple):
    address: bytes
    is_idle: Callable[[], bool]


class OpenConnections:
    """Makes room for a new connection by closing the oldest one that has no request.

    Args:
        most: in all.
        most_of_one: of one address; of IPv6, of one network of 64 bits, which is what a client has.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._open: dict[Transport, _Connection] = {}
        self._of_one: dict[bytes, int] = {}

    def enter(self, transport: Transport, address: str, is_idle: Callable[[], bool]) -> bool:
        """Counts a connection. False: there are too many, and all have requests."""
        key = _network(address)
        has_room = (self._of_one.get(key, 0) < self._most_of_one or self._close_idle(key)) and (
            len(self._open) < self._most or self._close_idle(None)
        )
        if has_room:
            self._open[transport] = _Connection(key, is_idle)
            self._of_one[key] = self._of_one.get(key, 0) + 1
        return has_room

    def leave(self, transport: Transport) -> None:
        """The connection is closed, or about to be."""
        if (connection := self._open.pop(transport, None)) is None:
            return
        self._of_one[connection.address] -= 1
        if not self._of_one[connection.address]:
            del self._of_one[connection.address]

    def _close_idle(self, address: bytes | None) -> bool:
        """Closes the oldest idle connection, of `address` if it is given. False: there is none."""
        for transport, connection in self._open.items():
            if address in (None, connection.address) and connection.is_idle():
                self.leave(transport)
                transport.abort()
                return True
        return False


@lru_cache(maxsize=4096)
def _network(address: str) -> bytes:
    ip = ipaddress.ip_address(address.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        return ip.packed[:8] if ip.ipv4_mapped is None else ip.ipv4_mapped.packed
    return ip.packed
