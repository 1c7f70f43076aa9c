"""Proxies before several gateways, by the settings of docs/many-gateways.md and of deploy/docker/proxy.conf.

Two small servers stand for the gateways: what is tried is the proxies' part.
"""

import asyncio
import re
import shutil
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import StreamingResponse
from websockets.asyncio.client import connect

from tests.support.systems.stack import free_port

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/many-gateways.md").read_text()
BIG = 8 * 1024 * 1024  # of a body; more than any proxy keeps by default
LAST_AFTER_S = 30.0  # between two events; what keeps the first one back gives it with the second
GATEWAYS = ("127.0.0.1", "127.0.0.2")


def gateway(name: str) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> str:
        return name

    @app.post("/v1/body")
    async def body(request: Request) -> dict[str, object]:
        count = 0
        async for part in request.stream():
            count += len(part)
        return {"bytes": count, "host": request.headers["host"]}

    @app.get("/v1/events")
    def events() -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield "data: first\n\n"
            await asyncio.sleep(LAST_AFTER_S)
            yield "data: last\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    @app.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(f"{name} {await websocket.receive_text()}")
        await websocket.close(1012)

    return app


@asynccontextmanager
async def serving(host: str, port: int) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """What ends it, before the end of the block."""
    server = uvicorn.Server(uvicorn.Config(gateway(host), host=host, port=port, log_level="error"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)

    async def end() -> None:
        server.should_exit = server.force_exit = True
        await running

    try:
        yield end
    finally:
        await end()


class Names(asyncio.DatagramProtocol):
    """A name server like Docker's: each name has the addresses of all gateways."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        question = data[12 : data.index(0, 12) + 5]
        answers = b"".join(struct.pack("!HHHIH", 0xC00C, 1, 1, 600, 4) + socket.inet_aton(each) for each in GATEWAYS)
        head = data[:2] + struct.pack("!HHHHH", 0x8180, 1, len(GATEWAYS), 0, 0)
        self._transport.sendto(head + question + answers, addr)


def of_document(language: str, port: int, upstream: int) -> str:
    """Its block, on other addresses and without TLS."""
    (written,) = re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)
    for number, host in enumerate(GATEWAYS, 11):
        written = written.replace(f"10.0.0.{number}:8000", f"{host}:{upstream}")
    written = re.sub(r" *ssl_certificate.*\n", "", written)
    return re.sub(r"443 ssl|:443 ssl crt \S+", f"127.0.0.1:{port}", written)


def nginx(directory: Path, port: int, upstream: int, _: int) -> list[str]:
    names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{name}_temp_path {directory}/{name};" for name in names)
    main = f"daemon off; pid {directory}/pid; events {{}} http {{ access_log off; {paths}"
    (directory / "proxy.conf").write_text(f"{main}\n{of_document('nginx', port, upstream)}}}")
    return ["nginx", "-e", "stderr", "-p", str(directory), "-c", str(directory / "proxy.conf")]


def haproxy(directory: Path, port: int, upstream: int, _: int) -> list[str]:
    (directory / "proxy.cfg").write_text(of_document("text", port, upstream))
    return ["haproxy", "-db", "-f", str(directory / "proxy.cfg")]


def compose(directory: Path, port: int, upstream: int, names: int) -> list[str]:
    written = (ROOT / "deploy/docker/proxy.conf").read_text().replace("/tmp/", f"{directory}/")
    written = written.replace("127.0.0.11", f"127.0.0.1:{names}").replace("listen 8000", f"listen 127.0.0.1:{port}")
    (directory / "proxy.conf").write_text(written.replace("$gateway:8000", f"$gateway:{upstream}"))
    return ["nginx", "-e", "stderr", "-c", str(directory / "proxy.conf")]


Proxy = Callable[[Path, int, int, int], list[str]]


@asynccontextmanager
async def proxied(directory: Path, proxy: Proxy, upstream: int) -> AsyncIterator[str]:
    """Its address."""
    port = free_port()
    loop = asyncio.get_running_loop()
    resolver, _ = await loop.create_datagram_endpoint(Names, local_addr=("127.0.0.1", 0))
    command = proxy(directory, port, upstream, resolver.get_extra_info("sockname")[1])
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with asyncio.timeout(30), httpx.AsyncClient() as client:
            while not await _answers(client, f"http://127.0.0.1:{port}/health"):
                assert process.returncode is None, command
                await asyncio.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        resolver.close()


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.weekly
@pytest.mark.parametrize("proxy", [nginx, haproxy, compose])
async def test_a_proxy_sends_any_request_to_any_gateway(tmp_path: Path, proxy: Proxy) -> None:
    if shutil.which("haproxy" if proxy is haproxy else "nginx") is None:
        pytest.skip("it is not installed")
    upstream = free_port()
    async with AsyncExitStack() as stack:
        end_first, _ = [await stack.enter_async_context(serving(host, upstream)) for host in GATEWAYS]
        address = await stack.enter_async_context(proxied(tmp_path, proxy, upstream))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{address}", timeout=20))

        async def told() -> Counter[str]:
            return Counter([(await client.get("/health")).json() for _ in range(60)])

        assert set(await told()) == set(GATEWAYS)  # of one client, on one connection

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(BIG // 65536):
                yield bytes(65536)

        for content in (bytes(BIG), parts()):
            answer = await client.post("/v1/body", content=content)
            assert answer.json() == {"bytes": BIG, "host": address}
        async with client.stream("GET", "/v1/events") as events:
            async with asyncio.timeout(LAST_AFTER_S / 2):
                assert await anext(events.aiter_text()) == "data: first\n\n"
        async with connect(f"ws://{address}/v1/realtime") as connection:
            await connection.send("hello")
            assert str(await connection.recv()).endswith(" hello")
            await connection.wait_closed()
            assert connection.close_code == 1012

        await end_first()
        assert await told() == {GATEWAYS[1]: 60}  # no request finds the one that is gone
