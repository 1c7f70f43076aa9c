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

_credentials: Credentials | None = None
_channels: dict[tuple[str, str], tuple[Identity | None, grpc.aio.Channel]] = {}
_retired: set[asyncio.Task[None]] = set()


def use(credentials: Credentials | None) -> None:
    """Says who this process is to others, from the next channel on; None: its connections are in the clear."""
    global _credentials
    _credentials = credentials


def are_secure() -> bool:
    """Whether channels are made by TLS."""
    return _credentials is not None


def channel(address: str, server_name: str = "") -> grpc.aio.Channel:
    """The process's one channel to `address` ("host:port"); it reconnects by itself.

    Ask for it at each call: it is another one when this process's certificate has changed.

    Args:
        server_name: that the peer's certificate must have; "" is the address's host. The credentials' own goes first.
    """
    identity = None if _credentials is None else _credentials.identity
    before, found = _channels.get((address, server_name), (None, None))
    if found is None or before is not identity:
        if found is not None:
            _retire(found)
        found = new_channel(address, identity, (_credentials and _credentials.server_name) or server_name)
        _channels[address, server_name] = identity, found
    return found


def new_channel(address: str, identity: Identity | None, server_name: str = "") -> grpc.aio.Channel:
    """A channel of the caller's own, who closes it."""
    if identity is None:
        return grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS)
    options = [*_CLIENT_OPTIONS, *name_options(server_name)]
    return grpc.aio.secure_channel(address, identity.channel_credentials(), options=options)


def name_options(server_name: str) -> list[tuple[str, str]]:
    """Channel options that have `server_name` looked for in the peer's certificate; "" is the address's host."""
    return [("grpc.ssl_target_name_override", server_name)] if server_name else []


def _retire(channel: grpc.aio.Channel) -> None:
    task = asyncio.get_running_loop().create_task(channel.close(_RETIRED_S))
    _retired.add(task)
    task.add_done_callback(_retired.discard)


async def close(address: str) -> None:
    """Closes the channels to `address`, if there are any."""
    for key in [key for key in _channels if key[0] == address]:
        await _channels.pop(key)[1].close()


async def close_all() -> None:
    """Closes every channel."""
    while _channels:
        _, (_, open_channel) = _channels.popitem()
        await open_channel.close()
    for task in list(_retired):
        task.cancel()
    await asyncio.gather(*_retired, return_exceptions=True)
