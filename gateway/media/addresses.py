"""Which hosts media may be fetched from."""

import asyncio
import ipaddress
import socket


class ForbiddenAddress(Exception):
    """A host that must not, or cannot, be connected to; the text says why."""


# Prefixes whose IPv6 addresses stand for an IPv4 address, and where in the 128 bits it is.
_EMBEDDED_IPV4 = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # IPv4-mapped
    (ipaddress.IPv6Network("::/96"), 0),  # IPv4-compatible
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
)
_IPV6_UNICAST = ipaddress.IPv6Network("2000::/3")  # all that is given out; site-local addresses, say, are outside


def is_public(address: str) -> bool:
    """Whether an IP address is a global unicast one, and so is any IPv4 address inside it."""
    ip = ipaddress.ip_address(address.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        for network, shift in _EMBEDDED_IPV4:
            if ip in network:
                return is_public(str(ipaddress.IPv4Address(int(ip) >> shift & 0xFFFFFFFF)))
        if ip not in _IPV6_UNICAST:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


async def resolve(host: str, port: int, private_allowed: bool) -> str:
    """An IP address of `host`, to be connected to as it is: asking the resolver again could give another answer.

    Raises:
        ForbiddenAddress: the name is unknown, or, unless `private_allowed`, any of its addresses is not public.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ForbiddenAddress(f"the host {host!r} cannot be resolved") from None
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses:
        raise ForbiddenAddress(f"the host {host!r} has no address")
    if not private_allowed and not all(map(is_public, addresses)):
        raise ForbiddenAddress(
            f"the host {host!r} is at a private or reserved address, and this server fetches from public ones only; "
            "send the file as a data URL"
        )
    return addresses[0]
