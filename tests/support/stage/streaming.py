"""This process as a client of stages: its channels, and a consumer of their streams."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from services.common.rpc.channels import Channels
from services.common.stream import consumer
from services.common.stream.consumer import ConsumerTransports, StreamConsumer
from services.common.stream.ucx import UcxTransport
from services.common.stream.ucx_worker import UcxWorker

consumer.CONNECT_TIMEOUT_S = 60.0  # a producer in a test is there, however late it answers
CHANNELS = Channels()
CONSUMER = StreamConsumer(CHANNELS)
subscribe = CONSUMER.subscribe


@contextlib.contextmanager
def reading(directory: Path, *transports: str, ucx: UcxWorker | None = None) -> Iterator[None]:
    """What CONSUMER subscribes to in the block may come by `transports`, or to `ucx`."""
    before = CONSUMER.transports
    CONSUMER.transports = ConsumerTransports(transports, directory, UcxTransport(ucx, 1) if ucx else None)
    try:
        yield
    finally:
        CONSUMER.transports = before
