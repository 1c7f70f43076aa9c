"""Addresses of replicas, by a pipeline file and by name servers."""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import structlog
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

# IP addresses of a host name. Raises OSError: the name cannot be looked up, or has none.
Resolver = Callable[[str], Awaitable[Sequence[str]]]
log = structlog.get_logger()

_ADDRESS = re.compile(r"(?:dns:///)?(\[[0-9a-fA-F:]+\]|[^\s:/,]+):([0-9]{1,5})")
_HOW = "write host:port, dns:///name:port or a list of these"


def _check(value: Any) -> str | list[str]:
    for address in value if isinstance(value, list) and value else [value]:
        match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if match is None or not 0 < int(match[2]) < 65536:
            raise PydanticCustomError("address", "{given} is no address; {how}", {"given": repr(address), "how": _HOW})
    if isinstance(value, list) and len(set(value)) < len(value):
        raise PydanticCustomError("address", "an address is there twice: remove one")
    return value


Addresses = Annotated[str | list[str], BeforeValidator(_check)]


@dataclass(frozen=True)
class Endpoint:
    """`host` has no brackets."""

    host: str
    port: int

    @property
    def is_literal(self) -> bool:
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


def endpoints(addresses: str | list[str]) -> list[Endpoint]:
    found = []
    for address in [addresses] if isinstance(addresses, str) else addresses:
        host, _, port = address.removeprefix("dns:///").rpartition(":")
        found.append(Endpoint(host.strip("[]"), int(port)))
    return found


def join(ip: str, port: int) -> str:
    """ "ip:port", as gRPC takes it."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


async def resolve_host(host: str) -> list[str]:
    """IPv4 addresses, or else IPv6 addresses: a process with both counts once. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    by_family: dict[int, dict[str, None]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, {})[str(address[0])] = None
    return list(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or {})


class NameWatcher:
    """Looks up the addresses behind a stage's endpoints. A name that cannot be looked up keeps its addresses.

    Args:
        on_change: gets all addresses ("ip:port") whenever they change, each with its host name, "" if it is literal.

    Attributes:
        errors: why the last look-up failed, by host.
    """

    def __init__(
        self, stage: str, endpoints: Sequence[Endpoint], on_change: Callable[[dict[str, str]], None], resolver: Resolver
    ) -> None:
        self.errors: dict[str, str] = {}
        self._stage, self._on_change, self._resolver = stage, on_change, resolver
        self._found = {endpoint: [endpoint.host] if endpoint.is_literal else [] for endpoint in endpoints}
        self._report()

    @property
    def is_settled(self) -> bool:
        return all(found or endpoint.host in self.errors for endpoint, found in self._found.items())

    async def watch(self, interval_s: float) -> None:
        """Looks up every name for ever. Returns at once without names."""
        names = [endpoint for endpoint in self._found if not endpoint.is_literal]
        await asyncio.gather(*(self._watch(endpoint, interval_s) for endpoint in names))

    async def _watch(self, endpoint: Endpoint, interval_s: float) -> None:
        while True:
            await self._look_up(endpoint)
            await asyncio.sleep(interval_s)

    async def _look_up(self, endpoint: Endpoint) -> None:
        host = endpoint.host
        try:
            found = sorted(await self._resolver(host))
        except Exception as error:  # e.g. a UnicodeError for a name that cannot be one: this must not end the watch
            reason = getattr(error, "strerror", None) or str(error)
        else:
            reason = "" if found else "the name has no address"
            if found and found != self._found[endpoint]:
                self._found[endpoint] = found
                log.info("stage resolved", stage=self._stage, name=host, addresses=found)
                self._report()
        if reason and self.errors.get(host) != reason:
            log.warning("stage cannot be resolved", stage=self._stage, name=host, error=reason)
        is_new = self.errors.get(host, "") != reason
        self.errors = {k: v for k, v in self.errors.items() if k != host} | ({host: reason} if reason else {})
        if is_new:
            self._report()

    def _report(self) -> None:
        addresses: dict[str, str] = {}
        for endpoint, ips in self._found.items():
            for ip in ips:
                addresses.setdefault(join(ip, endpoint.port), "" if endpoint.is_literal else endpoint.host)
        self._on_change(addresses)
