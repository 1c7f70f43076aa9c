"""gRPC channels to other stages, and the channel options both sides agree on."""

import grpc

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
    # gRPC takes this for the time that an attempt to connect has: TCP's and HTTP/2's handshakes, two round trips and
    # more, and a lost packet. One that is refused is made again after the backoff all the same.
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

_channels: dict[str, grpc.aio.Channel] = {}


def channel(address: str) -> grpc.aio.Channel:
    """The process's one channel to `address` ("host:port"); it reconnects by itself."""
    if address not in _channels:
        _channels[address] = grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS)
    return _channels[address]


async def close(address: str) -> None:
    """Closes the channel to `address`, if there is one."""
    if (open_channel := _channels.pop(address, None)) is not None:
        await open_channel.close()


async def close_all() -> None:
    """Closes every channel."""
    while _channels:
        _, open_channel = _channels.popitem()
        await open_channel.close()
