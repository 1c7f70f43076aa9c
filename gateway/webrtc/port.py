"""One UDP port for all calls."""

import asyncio
import socket
import struct
from collections.abc import Collection
from typing import Protocol, cast

from aioice import stun

_STUN_HEADER_BYTES = 20
_BINDING_REQUEST = b"\x00\x01"
_MAGIC_COOKIE = b"\x21\x12\xa4\x42"
_USERNAME = 6  # number of the attribute
_FIRST_OTHER = 4  # datagrams of STUN begin with a smaller byte (RFC 7983)
_BUFFER_BYTES = 4 * 1024 * 1024  # what strangers send must not crowd out the calls' datagrams

Address = tuple[str, int]


class Agent(Protocol):
    """A call's end of the port. `local_username` begins the USERNAME of its client's checks, whose integrity is by
    `local_password`."""

    local_username: str
    local_password: str

    @property
    def addresses(self) -> Collection[Address]: ...

    def checked(self, address: Address, nominated: bool) -> None:
        """The client has shown that it is at `address`."""

    def received(self, data: bytes) -> None: ...


class UdpPort(asyncio.DatagramProtocol):
    """Gives datagrams to the agents of their senders, answers STUN checks, and drops what strangers send.

    Attributes:
        told: addresses that clients are told to send to.
        number: of the port.
    """

    number: int

    def __init__(self, told: Collection[Address]) -> None:
        self.told = told
        self._by_name = dict[str, Agent]()
        self._by_address = dict[Address, Agent]()

    @property
    def agents(self) -> int:
        return len(self._by_name)

    @property
    def known_addresses(self) -> int:
        return len(self._by_address)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)
        self.number = transport.get_extra_info("sockname")[1]
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)

    def datagram_received(self, data: bytes, addr: Address) -> None:
        address = addr[:2]
        if data and data[0] < _FIRST_OTHER:
            self._check(data, address)
        elif (agent := self._by_address.get(address)) is not None:
            agent.received(data)

    def error_received(self, exc: Exception) -> None:
        """A client's machine says that nobody listens there: its consent ends by itself."""

    def send(self, data: bytes, address: Address) -> None:
        self._transport.sendto(data, address)

    def add(self, agent: Agent) -> None:
        self._by_name[agent.local_username] = agent

    def remove(self, agent: Agent) -> None:
        self._by_name.pop(agent.local_username, None)
        for address in agent.addresses:
            self.forget(agent, address)

    def forget(self, agent: Agent, address: Address) -> None:
        if self._by_address.get(address) is agent:
            del self._by_address[address]

    def close(self) -> None:
        self._transport.close()

    def _check(self, data: bytes, address: Address) -> None:
        agent = self._by_name.get(_username_of(data))  # before anything that costs more
        if agent is None:
            return
        try:
            request = stun.parse_message(data)
        except (ValueError, struct.error):  # aioice's parser checks no attribute's length
            return
        key = agent.local_password.encode()
        if not request.check_message_integrity(key):
            return
        if self._by_address.setdefault(address, agent) is not agent:
            return  # another call's client is there: nobody takes its datagrams by a forged address
        answer = stun.Message(stun.Method.BINDING, stun.Class.RESPONSE, request.transaction_id)
        answer.attributes["XOR-MAPPED-ADDRESS"] = address
        answer.add_message_integrity(key)
        self.send(bytes(answer), address)
        agent.checked(address, "USE-CANDIDATE" in request.attributes)


def _username_of(data: bytes) -> str:
    """Of a check: the part before the colon, which is ours. "" of anything else."""
    if len(data) < _STUN_HEADER_BYTES or data[:2] != _BINDING_REQUEST or data[4:8] != _MAGIC_COOKIE:
        return ""
    at = _STUN_HEADER_BYTES
    while at + 4 <= len(data):
        kind, size = int.from_bytes(data[at : at + 2]), int.from_bytes(data[at + 2 : at + 4])
        if kind == _USERNAME:
            return data[at + 4 : at + 4 + size].partition(b":")[0].decode("ascii", "replace")
        at += 4 + size + -size % 4
    return ""


async def open_port(host: str, number: int, told: Collection[Address]) -> UdpPort:
    """Raises OSError: the port is taken, or the address is not this machine's."""
    _, port = await asyncio.get_running_loop().create_datagram_endpoint(lambda: UdpPort(told), (host, number))
    return port
