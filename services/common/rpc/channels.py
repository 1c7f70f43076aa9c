"""gRPC channels to other stages, and the channel options both sides agree on."""

import asyncio

import grpc

from services.common.rpc.tls import Credentials, Identity

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer whose host or link is gone without a word is noticed within the timeout (gRPC makes it TCP_USER_TIMEOUT)
    # where something is under way, else within both times together.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CLIENT_OPTIONS = [
    *OPTIONS,
    # A stage that was restarted is reached again at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # gRPC takes this for the time that an attempt to connect has: the handshakes of TCP, TLS and HTTP/2, two round
    # trips and more, and a lost packet. One that is refused is made again after the backoff all the same.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS = [
    *OPTIONS,
    # A port in use is an error, not a second listener that takes half of the connections.
    ("grpc.so_reuseport", 0),
    # Less than the time between two of a peer's pings: else its connection, with its calls, ends as "too_many_pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 2_500),
]

# Calls that are under way when the certificate changes end on the connection that they began on; a video takes an hour.
_RETIRED_S = 24 * 3600.0


class Channels:
    """One channel to each other stage, made when it is first asked for. For one event loop.

    Args:
        credentials: who this side is to others, from the next channel on; None: its connections are in the clear.
    """

    def __init__(self, credentials: Credentials | None = None) -> None:
        self.credentials = credentials
        self._open: dict[tuple[str, str], tuple[Identity | None, grpc.aio.Channel]] = {}
        self._retired: set[asyncio.Task[None]] = set()

    def channel(self, address: str, server_name: str = "") -> grpc.aio.Channel:
        """The one channel to `address` ("host:port"); it reconnects by itself.

        Ask for it at each call: after a change of the certificate it is another one.

        Args:
            address: of the stage.
            server_name: that the peer's certificate must have; "" is the address's host. The credentials' own name goes
                first.
        """
        identity = None if self.credentials is None else self.credentials.identity
        before, found = self._open.get((address, server_name), (None, None))
        if found is None or before is not identity:
            if found is not None:
                self._retire(found)
            own_name = self.credentials and self.credentials.server_name
            found = new_channel(address, identity, own_name or server_name)
            self._open[address, server_name] = identity, found
        return found

    def _retire(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(channel.close(_RETIRED_S))
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)

    async def close(self, address: str) -> None:
        """Closes the channels to `address`, if there are any."""
        for key in [key for key in self._open if key[0] == address]:
            await self._open.pop(key)[1].close()

    async def close_all(self) -> None:
        """Closes every channel."""
        for address, _ in list(self._open):
            await self.close(address)
        for task in list(self._retired):
            task.cancel()
        await asyncio.gather(*self._retired, return_exceptions=True)


def new_channel(address: str, identity: Identity | None, server_name: str = "") -> grpc.aio.Channel:
    """A channel of the caller's own, who closes it."""
    if identity is None:
        return grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS)
    options = [*_CLIENT_OPTIONS, *name_options(server_name)]
    return grpc.aio.secure_channel(address, identity.channel_credentials(), options=options)


def name_options(server_name: str) -> list[tuple[str, str]]:
    """Channel options that have `server_name` looked for in the peer's certificate; "" is the address's host."""
    return [("grpc.ssl_target_name_override", server_name)] if server_name else []
