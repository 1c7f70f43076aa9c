"""Looks the names of a stage's replicas up, again and again."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

import structlog

from gateway.pipeline.addresses import Endpoint, join

# IP addresses of a host name. Raises OSError: the name cannot be looked up, or has none.
Resolver = Callable[[str], Awaitable[Sequence[str]]]

log = structlog.get_logger()


async def resolve_host(host: str) -> list[str]:
    """IPv4 addresses of `host` (A records), or else its IPv6 addresses: a process behind both shall count once.

    Raises:
        OSError: the name cannot be looked up, or has no address.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    by_family: dict[int, dict[str, None]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, {})[str(address[0])] = None
    return list(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or {})


class Names:
    """The addresses behind a stage's endpoints.

    A name that cannot be looked up keeps the addresses it had: a name server that fails is no reason to drop replicas
    that work, and those that do not are found by their health.

    Args:
        stage: name of the stage, for the log.
        endpoints: of the stage.
        on_change: told all addresses ("ip:port") when they have changed, each with the name that it was found by, ""
            for one that is literal; at once for those.
        resolver: looks a name up.

    Attributes:
        errors: why names could not be looked up the last time, by host.
    """

    def __init__(
        self,
        stage: str,
        endpoints: Sequence[Endpoint],
        on_change: Callable[[dict[str, str]], None],
        resolver: Resolver = resolve_host,
    ) -> None:
        self.errors: dict[str, str] = {}
        self._stage, self._on_change, self._resolver = stage, on_change, resolver
        self._found = {endpoint: [endpoint.host] if endpoint.is_literal else [] for endpoint in endpoints}
        self._tell()

    async def watch(self, interval_s: float) -> None:
        """Looks every name up for ever, `interval_s` after the last answer. Returns at once without names."""
        names = [endpoint for endpoint in self._found if not endpoint.is_literal]
        async with asyncio.TaskGroup() as group:
            for endpoint in names:
                group.create_task(self._watch(endpoint, interval_s))

    async def _watch(self, endpoint: Endpoint, interval_s: float) -> None:
        while True:
            await self._look_up(endpoint)
            await asyncio.sleep(interval_s)

    async def _look_up(self, endpoint: Endpoint) -> None:
        host = endpoint.host
        try:
            found = sorted(await self._resolver(host))
        except OSError as error:
            reason = error.strerror or str(error)
        except Exception as error:  # e.g. a UnicodeError for a name that cannot be one: this must not end the watch
            reason = str(error)
        else:
            reason = "" if found else "the name has no address"
            if found and found != self._found[endpoint]:
                self._found[endpoint] = found
                log.info("stage resolved", stage=self._stage, name=host, addresses=found)
                self._tell()
        if reason and self.errors.get(host) != reason:
            log.warning("stage cannot be resolved", stage=self._stage, name=host, error=reason)
        self.errors = {k: v for k, v in self.errors.items() if k != host} | ({host: reason} if reason else {})

    def _tell(self) -> None:
        addresses: dict[str, str] = {}
        for endpoint, ips in self._found.items():
            for ip in ips:
                addresses.setdefault(join(ip, endpoint.port), "" if endpoint.is_literal else endpoint.host)
        self._on_change(addresses)
