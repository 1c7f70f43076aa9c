"""A network that loses datagrams, and delays each by another time."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

Address = tuple[str, int]


@dataclass
class Network:
    """What it does to each datagram, in both directions, and what it did.

    Attributes:
        loss: the share that is lost.
        jitter_s: each is delayed by up to this, so that later ones overtake it.
        number: the UDP port that stands for the server's.
    """

    loss: float = 0.0
    jitter_s: float = 0.0
    number: int = 0
    passed: int = 0
    lost: int = 0

    def carry(self, data: bytes, transport: asyncio.DatagramTransport, address: Address | None) -> None:
        if random.random() < self.loss:
            self.lost += 1
            return
        self.passed += 1
        loop, delay_s = asyncio.get_running_loop(), random.uniform(0, self.jitter_s)
        loop.call_later(delay_s, lambda: transport.is_closing() or transport.sendto(data, address))


class _Front(asyncio.DatagramProtocol):
    """Has an own port before the server for each client, as a router has."""

    def __init__(self, network: Network, server: Address) -> None:
        self.network, self.server = network, server
        self.backs = dict[Address, asyncio.Future[asyncio.DatagramTransport]]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)
        self.network.number = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: Address) -> None:
        if addr not in self.backs:
            self.backs[addr] = asyncio.ensure_future(self._open(addr))
        self.backs[addr].add_done_callback(lambda back: self.network.carry(data, back.result(), None))

    async def _open(self, client: Address) -> asyncio.DatagramTransport:
        made = asyncio.get_running_loop().create_datagram_endpoint(lambda: _Back(self, client), remote_addr=self.server)
        return (await made)[0]


class _Back(asyncio.DatagramProtocol):
    def __init__(self, front: _Front, client: Address) -> None:
        self.front, self.client = front, client

    def datagram_received(self, data: bytes, addr: Address) -> None:
        self.front.network.carry(data, self.front.transport, self.client)


@asynccontextmanager
async def before(server: int, network: Network) -> AsyncIterator[Network]:
    """`network` before a UDP port of this machine."""
    loop = asyncio.get_running_loop()
    _, front = await loop.create_datagram_endpoint(lambda: _Front(network, ("127.0.0.1", server)), ("127.0.0.1", 0))
    try:
        yield network
    finally:
        front.transport.close()
        for back in front.backs.values():
            (await back).close()
