"""The process of WebRTC's calls in the tests' own process, beside a gateway before scripted stages."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import uvicorn

from cli.ports import free_ports
from gateway.webrtc.server import Calls, create_app
from gateway.webrtc.settings import WebRtcSettings
from tests.support.network.lossy import Network, before
from tests.support.systems.gateway import Running, running


@dataclass
class CallServer:
    """A gateway with calls. `calls` is what the other process has."""

    gateway: Running
    calls: Calls

    async def all_gone(self) -> None:
        """Returns when nothing is left of any call."""
        port = self.calls.port
        open_here = self.gateway.app.state.gateway
        await self.gateway.until(
            lambda: not (len(self.calls) or port.agents or port.known_addresses or open_here.realtime_sessions)
        )


@asynccontextmanager
async def call_server(
    network: Network | None = None, max_calls: int = 64, **settings: Any
) -> AsyncIterator[CallServer]:
    """A gateway with `settings`, and calls whose datagrams go through `network`."""
    port, udp_port = free_ports(2)
    async with (
        running(webrtc=f"http://127.0.0.1:{port}", **settings) as gateway,
        before(udp_port, network) if network else nullcontext() as way,
    ):
        told = [f"127.0.0.1:{way.number if way else udp_port}"]
        own = WebRtcSettings(gateway=gateway.url, port=port, udp_port=udp_port, addresses=told, max_calls=max_calls)
        app = create_app(own)
        config = uvicorn.Config(app, port=port, log_config=None, access_log=False, ws="websockets-sansio")
        server = uvicorn.Server(config)
        server.capture_signals = nullcontext  # signals are pytest's  # pyright: ignore[reportAttributeAccessIssue]
        task = asyncio.create_task(server.serve())
        await gateway.until(lambda: server.started or task.done())
        try:
            yield CallServer(gateway, app.state.calls)
        finally:
            server.should_exit = True
            await task
