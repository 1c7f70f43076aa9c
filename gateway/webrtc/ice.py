"""ICE-lite: waits for the client's checks, and sends none (RFC 8445, 2.5).

A server that clients reach needs no more: no STUN or TURN server, and no candidates of the client, whose checks tell
where it is."""

import asyncio
import secrets

from gateway.webrtc.port import Address, UdpPort

CONSENT_S = 30.0  # RFC 7675: without a check for so long the client does not want what is sent
_MAX_ADDRESSES = 8  # of one client, whose network changes
_MAX_WAITING = 512  # datagrams; more are dropped, as a network drops them


class IceLite:
    """A call's end of the port, in the shape of the transport that aiortc's DTLS wants.

    Raises ConnectionError in `_recv` and `_send` once it is closed, or its client has not been heard."""

    role = "controlled"

    def __init__(self, port: UdpPort) -> None:
        self.local_username, self.local_password = secrets.token_hex(8), secrets.token_hex(16)
        self.addresses = dict[Address, None]()  # the newest last
        self._port, self._address = port, None
        self._connected, self._inbox = asyncio.Event(), asyncio.Queue[bytes | None](_MAX_WAITING)
        self._is_closed, self._timer = False, None
        port.add(self)

    async def connect(self, timeout_s: float) -> None:
        """Raises TimeoutError: the client does not reach the port."""
        async with asyncio.timeout(timeout_s):
            await self._connected.wait()

    def checked(self, address: Address, nominated: bool) -> None:
        self.addresses.pop(address, None)
        self.addresses[address] = None
        if nominated or self._address is None:
            self._address = address
        while len(self.addresses) > _MAX_ADDRESSES:
            oldest = next(each for each in self.addresses if each != self._address)
            del self.addresses[oldest]
            self._port.forget(self, oldest)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(CONSENT_S, self.close)
        self._connected.set()

    def received(self, data: bytes) -> None:
        if not self._inbox.full():
            self._inbox.put_nowait(data)

    async def _recv(self) -> bytes:
        data = None if self._is_closed else await self._inbox.get()
        if data is None:
            raise ConnectionError("the client is gone")
        return data

    async def _send(self, data: bytes) -> None:
        if self._is_closed or self._address is None:
            raise ConnectionError("the client is gone")
        self._port.send(data, self._address)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._port.remove(self)
        if self._inbox.full():
            self._inbox.get_nowait()
        self._inbox.put_nowait(None)  # wakes who waits
