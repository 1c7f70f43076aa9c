"""nginx in front of a gateway, by the settings of docs/security.md: no request meets the end of an idle connection."""

import asyncio
import random
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect

from tests.support.scripted.stages import scripted_stages
from tests.support.systems.gateway import SPEECH
from tests.support.systems.stack import free_port

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}
GATEWAY_S, NGINX_S, USERS, TURNS = 5, 4, 60, 6


def settings(directory: Path, port: int, gateway_port: int) -> str:
    """The document's, on other ports, without TLS, and with an upstream of its own for each user."""
    (written,) = re.findall(r"```nginx\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    shown, servers = re.split(r"(?=^server )", written, flags=re.MULTILINE)
    upgrade, upstream = re.split(r"(?=^upstream )", shown, flags=re.MULTILINE)
    upstream = (
        upstream.replace("60s", f"{NGINX_S}s")
        .replace(":8000", f":{gateway_port}")
        .replace("keepalive 64", "keepalive 1")
    )
    servers = re.sub(r" *ssl_certificate.*\n", "", servers).replace("443 ssl", f"127.0.0.1:{port}")
    head, location = re.split(r"(?=^    location )", servers.rstrip().removesuffix("}"), flags=re.MULTILINE)
    locations = [
        location.replace("/v1/", f"/{i}/v1/").replace("http://quartet", f"http://quartet{i}/v1/") for i in range(USERS)
    ]
    upstreams = [upstream.replace("quartet", f"quartet{i}") for i in range(USERS)]
    paths = "".join(
        f"{name}_temp_path {directory}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = f"daemon off; pid {directory}/pid; error_log {directory}/error.log; events {{}}"
    return "\n".join([main, "http {", "access_log off;", paths, upgrade, *upstreams, head, *locations, "}}"])


@asynccontextmanager
async def proxied(directory: Path) -> AsyncIterator[str]:
    """The address of nginx before a gateway before scripted stages."""
    async with scripted_stages() as stages:
        port, gateway_port = free_port(), free_port()
        addresses = [f"--stage={stage}={address}" for stage, address in stages.addresses.items()]
        flags = [f"--pipeline={SPEECH}", f"--port={gateway_port}", f"--keep-alive-s={GATEWAY_S}", *addresses]
        (directory / "nginx.conf").write_text(settings(directory, port, gateway_port))
        gateway = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", *flags)
        nginx = await asyncio.create_subprocess_exec("nginx", "-p", directory, "-c", directory / "nginx.conf")
        try:
            async with asyncio.timeout(120), httpx.AsyncClient(verify=False) as client:
                while (await _status(client, f"http://127.0.0.1:{gateway_port}/ready")) != 200:
                    await asyncio.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            for process in (nginx, gateway):
                process.terminate()
                await process.wait()


async def _status(client: httpx.AsyncClient, url: str) -> int | None:
    try:
        return (await client.get(url)).status_code
    except httpx.TransportError:
        return None


@pytest.mark.weekly
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
async def test_pauses_around_the_end_of_an_idle_connection(tmp_path: Path) -> None:
    async with proxied(tmp_path) as address:
        answers = []

        async def talk(user: int) -> None:
            draw = random.Random(user)
            for turn in range(TURNS):
                async with httpx.AsyncClient(timeout=60, verify=False) as client:
                    url = f"http://{address}/{user}/v1/chat/completions"
                    answer = await client.post(url, json=BODY | {"stream": turn % 2 == 1})
                answers.append((answer.status_code, "Hello" in answer.text))
                ends = (GATEWAY_S, GATEWAY_S, NGINX_S)
                await asyncio.sleep(
                    draw.choice([draw.uniform(0, 6), *(end + draw.uniform(-0.012, 0.002) for end in ends)])
                )

        await asyncio.gather(*(talk(user) for user in range(USERS)))
        assert answers == [(200, True)] * USERS * TURNS
        async with connect(f"ws://{address}/0/v1/responses") as socket:
            await socket.send('{"type": "response.create", "model": "scripted", "input": "Hello"}')
            assert "response.created" in str(await socket.recv())
    assert "[error]" not in (tmp_path / "error.log").read_text()
