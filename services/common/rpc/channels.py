"""gRPC channels to other stages, and the channel options both sides agree on."""

import asyncio

import grpc

from services.common.rpc.tls import Credentials, Identity

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_CALLS = 1024  # at a time, of one connection, which keeps further ones back; more for a stage of more requests
MAX_CHANNELS = 256  # to other stages; a request may name any address

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),  # also of what a compressed one becomes
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A host or link that vanished is noticed within the timeout (which gRPC makes TCP_USER_TIMEOUT) while something is
    # under way, else within both times together.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CLIENT_OPTIONS = [
    *OPTIONS,
    # A restarted stage is reached again at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # gRPC gives an attempt to connect this time: handshakes of TCP, TLS and HTTP/2, and a lost packet. A refused one is
    # made again after the backoff.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS = [
    *OPTIONS,
    # A port in use is an error, not a second listener that takes half of the connections.
    ("grpc.so_reuseport", 0),
    # Less than the time between a peer's pings: else its connection ends as "too_many_pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 2_500),
]

_RETIRED_S = 24 * 3600.0  # for running calls to end on a channel of the certificate before; a video takes an hour


class Channels:
    """One channel to each other stage, opened at its first use. For one event loop.

    Args:
        credentials: this side's, from the next channel on; None: in the clear.
    """

    def __init__(self, credentials: Credentials | None = None) -> None:
        self.credentials = credentials
        self._open: dict[tuple[str, str], tuple[Identity | None, grpc.aio.Channel]] = {}
        self._retired: set[asyncio.Task[None]] = set()

    def channel(self, address: str, server_name: str = "") -> grpc.aio.Channel:
        """The channel to `address` ("host:port"), which reconnects by itself. Ask for it at each call: a change of the
        certificate makes another one.

        Args:
            address: of the stage.
            server_name: that the peer's certificate must have, unless the credentials name one; "": the address's host.
        """
        identity = None if self.credentials is None else self.credentials.identity
        before, found = self._open.get((address, server_name), (None, None))
        if found is None or before is not identity:
            if found is not None:
                self._retire(found)
            own_name = self.credentials and self.credentials.server_name
            found = new_channel(address, identity, own_name or server_name)
            self._open.pop((address, server_name), None)
            self._open[address, server_name] = identity, found
            while len(self._open) > MAX_CHANNELS:  # the oldest; its running calls end on it
                self._retire(self._open.pop(next(iter(self._open)))[1])
        return found

    def _retire(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(channel.close(_RETIRED_S))
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)

    async def close(self, address: str) -> None:
        for key in [key for key in self._open if key[0] == address]:
            await self._open.pop(key)[1].close()

    async def close_all(self) -> None:
        for address, _ in list(self._open):
            await self.close(address)
        for task in list(self._retired):
            task.cancel()
        await asyncio.gather(*self._retired, return_exceptions=True)


def new_channel(address: str, identity: Identity | None, server_name: str = "") -> grpc.aio.Channel:
    """A channel that the caller closes."""
    if identity is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    options = [*CLIENT_OPTIONS, *name_options(server_name)]
    return grpc.aio.secure_channel(address, identity.channel_credentials(), options=options)


def name_options(server_name: str) -> list[tuple[str, str]]:
    """Channel options for the name in the peer's certificate; "": the address's host."""
    return [("grpc.ssl_target_name_override", server_name)] if server_name else []
