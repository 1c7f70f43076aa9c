"""The program: listens, and asks the gateway."""

import asyncio
import signal
from contextlib import suppress
from functools import partial
from urllib.parse import urlparse

import httpx
import structlog
from wyoming.server import AsyncServer

from cli.terminal import CommandError
from cli.wyoming.connection import WyomingConnection, WyomingService
from cli.wyoming.gateway_client import GatewayClient
from cli.wyoming.known_offer import KnownOffer
from services.common.telemetry.logs import configure

_LAST_S = 5.0  # for connections to end
log = structlog.get_logger()


def check(uri: str) -> None:
    """Raises ValueError: nobody can listen there."""
    parts = urlparse(uri)
    if not (
        (parts.scheme == "tcp" and parts.hostname and parts.port is not None) or (parts.scheme == "unix" and parts.path)
    ):
        raise ValueError(f"{uri!r} is not tcp://HOST:PORT, or unix://PATH")


async def serve(url: str, uri: str, languages: list[str], api_key: str | None) -> None:
    """Returns after SIGTERM or ctrl-C. Raises CommandError.

    Args:
        uri: one that `check` lets through.
        languages: ISO 639-1 codes to offer; none: all.
    """
    configure("info", "wyoming")
    try:
        gateway = GatewayClient(url, api_key)
    except httpx.InvalidURL as error:
        raise CommandError(f"--url {url}: {error}") from None
    known = KnownOffer(gateway)
    service, server = WyomingService(gateway, known, languages), AsyncServer.from_uri(uri)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        await server.start(partial(WyomingConnection, service))
    except OSError as error:
        raise CommandError(f"--uri {uri}: {error}") from None
    keeping = asyncio.create_task(known.keep())
    try:
        log.info("listening", uri=uri, url=gateway.url)
        await stopped.wait()
    finally:
        keeping.cancel()
        await server.stop()
        if service.connections:
            await asyncio.wait(service.connections, timeout=_LAST_S)
        with suppress(httpx.HTTPError):
            await gateway.close()
        log.info("stopped")
