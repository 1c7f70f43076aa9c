"""Calls and Live sessions of gateways that are processes, with worker processes, and with processes of calls."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from cli.ports import free_ports
from tests.support.clients.caller import calling
from tests.support.clients.live_client import LiveClient, connected, live
from tests.support.clients.voices import bearer, keys
from tests.support.scripted.stages import scripted_stages
from tests.support.systems.call_ends import NO_TURNS
from tests.support.systems.gateway import SPEECH
from tests.support.systems.gateways import Gateways, gateways
from tests.support.systems.stack import stopped

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
LIVE = "/v1/live/sessions"
ALICE: dict[str, Any] = {"additional_headers": bearer("alice")}
GUARD_S = 60.0


@contextmanager
def process_of_calls(gateway: str, port: int) -> Iterator[None]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.bind(("127.0.0.1", 0))
        udp_port = found.getsockname()[1]
    flags = [f"--gateway={gateway}", f"--port={port}", f"--udp-port={udp_port}", "--udp-host=127.0.0.1"]
    process = subprocess.Popen([sys.executable, "-m", "gateway.webrtc", *flags])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def two(folder: Path, postgres_url: str, **settings: Any) -> AsyncIterator[Gateways]:
    async with scripted_stages() as stages:
        shared = {"database_url": postgres_url, "api_keys_file": keys(folder), **settings}
        async with gateways(2, SPEECH, stages.addresses, folder, **shared) as started:
            yield started


def clients(started: Gateways) -> list[httpx.AsyncClient]:
    return [httpx.AsyncClient(base_url=url, timeout=GUARD_S, headers=bearer("alice")) for url in started.urls]


def at(url: str) -> Any:
    return SimpleNamespace(url=url)


async def test_a_call_is_controlled_and_hung_up_at_another_gateway(tmp_path: Path, postgres_url: str) -> None:
    """Each gateway has a process of calls of its own. Then that of a call stands still, goes on, and is killed."""
    ports = free_ports(2)
    webrtc = [f"http://127.0.0.1:{port}" for port in ports]
    async with contextlib.AsyncExitStack() as stack:
        started = await stack.enter_async_context(two(tmp_path, postgres_url, webrtc=webrtc))
        for url, port in zip(started.urls, ports, strict=True):
            stack.enter_context(process_of_calls(url, port))
        first, second = [await stack.enter_async_context(each) for each in clients(started)]
        for url in webrtc:
            await _healthy(url)
        events = started.urls[1].replace("http", "ws") + "/v1/realtime?call_id="
        async with calling(first) as caller:
            call_id = caller.location.rpartition("/")[2]
            async with connect(events + call_id, **ALICE) as controller:
                assert json.loads(await controller.recv())["type"] == "session.created"
                session = NO_TURNS | {"instructions": "Sing."}
                await controller.send(json.dumps({"type": "session.update", "session": session}))
                assert (await caller.until("session.updated"))["session"]["instructions"] == "Sing."
                assert json.loads(await controller.recv())["type"] == "session.updated"
                stranger = await second.post(f"{caller.location}/hangup", headers=bearer("bob"))
                assert stranger.status_code == 404
                assert (await second.post(f"{caller.location}/hangup")).status_code == 200
                async with asyncio.timeout(GUARD_S):
                    await controller.wait_closed()
                assert controller.close_code == 1000
            assert (await second.post(f"{caller.location}/hangup")).status_code == 404
        async with calling(first) as caller:
            call_id = caller.location.rpartition("/")[2]
            with stopped(started.pid(0)):  # it takes connections, and answers none
                answer = await second.post(f"/v1/realtime/calls/{call_id[:-1]}/hangup")
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "call_id_not_found")
            async with await _found_again(events + call_id) as controller:
                await controller.recv()
                await started.kill(0)
                async with asyncio.timeout(GUARD_S):
                    await controller.wait_closed()
                assert (controller.close_code, controller.close_reason) == (1011, "the process that had this is gone")
            answer = await second.post(f"{caller.location}/hangup")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "call_id_not_found")
            with pytest.raises(InvalidStatus) as refused:
                await connect(events + call_id, **ALICE)
            assert refused.value.response.status_code == 404


async def _found_again(url: str) -> ClientConnection:
    """A gateway that goes on says within seconds that it is there."""
    async with asyncio.timeout(GUARD_S):
        while True:
            with contextlib.suppress(InvalidStatus):
                return await connect(url, **ALICE)
            await asyncio.sleep(0.5)


async def _healthy(url: str) -> None:
    async with asyncio.timeout(GUARD_S), httpx.AsyncClient() as http:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(f"{url}/health")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


async def test_a_live_session_of_one_worker_is_found_at_each(tmp_path: Path, postgres_url: str) -> None:
    """Connections go to the workers by chance. Then the gateway of a session is killed."""
    async with (
        two(tmp_path, postgres_url, workers=[2, 1]) as started,
        live(at(started.urls[0]), options=ALICE) as client,
    ):
        path = f"{LIVE}/{client.started['id']}"
        for url in started.urls:
            for _ in range(6):
                await _is_found(url, path)
        await asyncio.gather(*(_hang_up_anew(started, number) for number in range(8)))
        async with connected(at(started.urls[1]), f"{path}/attach", **ALICE) as sideband:
            await sideband.until("session.started")
            os.kill(started.pid(1), signal.SIGTERM)
            await _closed(sideband, 1012)  # the session goes on, and another gateway has a sideband of it
        await started.kill(1)
        await started.start(1)
        async with connected(at(started.urls[1]), f"{path}/attach", **ALICE) as sideband:
            await sideband.until("session.started")
            await started.kill(0)
            await _closed(sideband, 1011)
        await _is_gone(started.urls[1], path)


async def _is_found(url: str, path: str) -> None:
    async with connected(at(url), f"{path}/attach", **ALICE) as sideband:
        await sideband.until("session.started")
    async with connected(at(url), f"{path}/attach", additional_headers=bearer("bob")) as stranger:
        assert (await stranger.event())["error"]["code"] == "session_not_found"


async def _hang_up_anew(started: Gateways, number: int) -> None:
    """A connection of its own for each request: at some worker of a gateway."""
    async with live(at(started.urls[number % 2]), options=ALICE) as client:
        path = f"{LIVE}/{client.started['id']}/hangup"
        async with httpx.AsyncClient(base_url=started.urls[number // 2 % 2], timeout=GUARD_S) as http:
            assert (await http.post(path, headers=bearer("bob"))).status_code == 404
            assert (await http.post(path, headers=bearer("alice"))).status_code == 200
        assert (await client.until("session.closed"))["reason"] == "remote_hangup"


async def _is_gone(url: str, path: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=GUARD_S) as http:
        answer = await http.post(f"{path}/hangup", headers=bearer("alice"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
    async with connected(at(url), f"{path}/attach", **ALICE) as sideband:
        assert (await sideband.event())["error"]["code"] == "session_not_found"


async def _closed(client: LiveClient, code: int) -> None:
    async with asyncio.timeout(GUARD_S):
        await client.socket.wait_closed()
    assert client.socket.close_code == code
