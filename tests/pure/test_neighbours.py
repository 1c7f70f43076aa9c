"""Calls and Live sessions of several gateways that share a database: whichever a client asks, it finds them."""

import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import ValidationError
from sqlalchemy import create_engine, delete, insert, select
from sqlalchemy.engine import make_url
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from cli.ports import free_ports
from gateway.http.neighbours.finder import PASSED_ON
from gateway.http.neighbours.tables import neighbours
from gateway.settings import GatewaySettings
from tests.support.clients.caller import calling
from tests.support.clients.live_client import connected, live
from tests.support.clients.voices import bearer, keys
from tests.support.systems.call_ends import NO_TURNS
from tests.support.systems.calls import CallServer, call_server
from tests.support.systems.gateway import SPEECH, Running, running
from tests.support.systems.postgres import fresh_database

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIVE = "/v1/live/sessions"


def neighbour(url: str) -> dict[str, Any]:
    """Settings of a gateway that others of the database at `url` reach."""
    (port,) = free_ports(1)
    return {"port": port, "own_url": f"http://127.0.0.1:{port}", "database_url": url}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def database(postgres_server: str) -> AsyncIterator[str]:
    with fresh_database(postgres_server) as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory, database: str) -> AsyncIterator[tuple[CallServer, Running]]:
    """A gateway with a process of calls, and one without."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "signing.key").write_bytes(bytes(32))
    shared = {"api_keys_file": keys(folder), "signing_key_file": folder / "signing.key"}
    async with (
        call_server(**shared, **neighbour(database)) as first,
        running(**shared, **neighbour(database)) as second,
    ):
        for each in (first.gateway, second):
            each.http.headers.update(bearer("alice"))
        yield first, second


@pytest.fixture
def holder(two: tuple[CallServer, Running]) -> CallServer:
    return two[0]


@pytest.fixture
def other(two: tuple[CallServer, Running]) -> Running:
    return two[1]


@contextmanager
def listed(database: str, url: str, is_there: bool) -> Iterator[str]:
    """A gateway stands in the database: its name."""
    row = {"name": "0123456789ab", "url": url, "there_until": time.time() + (3600 if is_there else -3600)}
    engine = create_engine(make_url(database).set(drivername="postgresql+psycopg"))
    try:
        with engine.begin() as connection:
            connection.execute(insert(neighbours).values(**row))
        yield row["name"]
        with engine.begin() as connection:
            connection.execute(delete(neighbours).where(neighbours.c.name == row["name"]))
    finally:
        engine.dispose()


async def test_a_second_controller_at_another_gateway(holder: CallServer, other: Running) -> None:
    url = other.url.replace("http", "ws")
    async with calling(holder.gateway.http) as caller:
        call_id = caller.location.rpartition("/")[2]
        for path in ("/v1/realtime", "/openai/v1/realtime"):
            async with connect(f"{url}{path}?call_id={call_id}", additional_headers=bearer("alice")) as controller:
                assert json.loads(await controller.recv())["type"] == "session.created"
                session = NO_TURNS | {"instructions": f"Sing at {path}."}
                await controller.send(json.dumps({"type": "session.update", "session": session}))
                updated = await caller.until("session.updated")
                assert updated["session"]["instructions"] == session["instructions"]
                assert json.loads(await controller.recv())["event_id"] == updated["event_id"]
        await caller.close()
    await holder.all_gone()
    assert other.app.state.gateway.realtime_sessions == 0


async def test_a_hang_up_at_another_gateway_ends_a_call_and_its_controllers(holder: CallServer, other: Running) -> None:
    url = other.url.replace("http", "ws")
    for prefix in ("", "/openai"):
        async with calling(holder.gateway.http) as caller:
            address = f"{url}/v1/realtime?call_id={caller.location.rpartition('/')[2]}"
            async with connect(address, additional_headers=bearer("alice")) as controller:
                await controller.recv()
                assert (await other.http.post(f"{prefix}{caller.location}/hangup")).status_code == 200
                await controller.wait_closed()
                assert controller.close_code == 1000
            again = await other.http.post(f"{prefix}{caller.location}/hangup")
            assert (again.status_code, again.json()["error"]["code"]) == (404, "call_id_not_found")
    await holder.all_gone()


async def test_a_call_of_another_key_is_found_at_no_gateway(holder: CallServer, other: Running) -> None:
    url = other.url.replace("http", "ws")
    made = await other.http.post("/v1/realtime/client_secrets", json={"session": {"type": "realtime"}})
    async with calling(holder.gateway.http) as caller:
        address = f"{url}/v1/realtime?call_id={caller.location.rpartition('/')[2]}"
        for key, status in (("bob", 404), (made.json()["value"], 401)):
            with pytest.raises(InvalidStatus) as refused:
                await connect(address, additional_headers=bearer(key))
            answer = refused.value.response
            assert (answer.status_code, "error" in json.loads(answer.body or b"{}")) == (status, True)
        answer = await other.http.post(f"{caller.location}/hangup", headers=bearer("bob"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "call_id_not_found")
        assert len(holder.calls) == 1
    await holder.all_gone()


async def test_a_sideband_and_a_hang_up_at_another_gateway(holder: CallServer, other: Running) -> None:
    alice = {"additional_headers": bearer("alice")}
    async with live(holder.gateway, options=alice) as client:
        path = f"{LIVE}/{client.started['id']}"
        async with connected(other, f"{path}/attach", **alice) as sideband:
            assert (await sideband.until("session.started"))["session"]["id"] == client.started["id"]
            refused = await sideband.refusal("session.input_audio.append", audio="AAAA")
            assert refused["message"].startswith("type: a sideband sends no")
            async with connected(other, f"{path}/attach", additional_headers=bearer("bob")) as stranger:
                assert (await stranger.event())["error"]["code"] == "session_not_found"
                await stranger.socket.wait_closed()
                assert stranger.socket.close_code == 1008
            assert (await other.http.post(f"{path}/hangup", headers=bearer("bob"))).status_code == 404
            assert (await other.http.post(f"{path}/hangup")).status_code == 200
            for each in (sideband, client):
                assert (await each.until("session.closed"))["reason"] == "remote_hangup"
                await each.socket.wait_closed()
                assert each.socket.close_code == 1000
        again = await other.http.post(f"{path}/hangup")
        assert (again.status_code, again.json()["error"]["code"]) == (404, "session_not_found")
        counted = (await other.http.get("/metrics")).text  # by the routes, without ids
        for route in ("attach", "hangup"):
            assert f'path="{LIVE}/{{session_id}}/{route}"' in counted
        assert client.started["id"] not in counted


async def test_a_browsers_key_goes_along(holder: CallServer, other: Running) -> None:
    offered = ["realtime", "openai-insecure-api-key.alice"]
    async with live(holder.gateway, options={"additional_headers": bearer("alice")}) as client:
        path = f"{LIVE}/{client.started['id']}/attach"
        async with connected(other, path, subprotocols=offered) as sideband:
            assert sideband.socket.subprotocol == "realtime"
            await sideband.until("session.started")


async def test_what_was_passed_on_goes_no_further(holder: CallServer, other: Running) -> None:
    async with live(holder.gateway, options={"additional_headers": bearer("alice")}) as client:
        path = f"{LIVE}/{client.started['id']}/hangup"
        assert (await other.http.post(path, headers={PASSED_ON: "1"})).status_code == 404
        assert (await holder.gateway.http.post(path, headers={PASSED_ON: "1"})).status_code == 200


@contextmanager
def silent() -> Iterator[str]:
    """A place that answers nobody: its queue of connections is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


WAYS = ["its lease is over", "nobody is at its address", "nothing answers there", "another one is there"]


@pytest.mark.parametrize("way", WAYS)
async def test_what_a_gateway_had_that_is_gone(holder: CallServer, other: Running, database: str, way: str) -> None:
    urls = {"another one is there": nullcontext(holder.gateway.url), "nothing answers there": silent()}
    closed = nullcontext(f"http://127.0.0.1:{free_ports(1)[0]}")
    with urls.get(way, closed) as url, listed(database, url, way != "its lease is over") as name:
        session, call = f"{LIVE}/live_{name}00_{'a' * 24}", f"rtc_{name}00_{'a' * 24}"
        answer = await other.http.post(f"{session}/hangup")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
        assert "its gateway is gone" in answer.json()["error"]["message"]
        for gateway in (other, holder.gateway):  # without a process of calls, and with one
            answer = await gateway.http.post(f"/v1/realtime/calls/{call}/hangup")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "call_id_not_found")
            assert "its gateway is gone" in answer.json()["error"]["message"]
            address = f"{gateway.url.replace('http', 'ws')}/v1/realtime?call_id={call}"
            with pytest.raises(InvalidStatus) as refused:
                await connect(address, additional_headers=bearer("alice"))
            assert refused.value.response.status_code == 404
        async with connected(other, f"{session}/attach", additional_headers=bearer("alice")) as sideband:
            assert (await sideband.event())["error"]["code"] == "session_not_found"


async def test_a_process_of_calls_that_gateways_share(holder: CallServer, database: str, tmp_path: Path) -> None:
    """It has the call, wherever the gateway is that was asked for it, and though the database tells nothing."""
    own = holder.gateway.app.state.gateway.settings
    settings = {"api_keys_file": keys(tmp_path), "webrtc": own.webrtc}
    async with running(**settings, **neighbour(database)) as third, calling(third.http, **bearer("alice")) as caller:
        assert (await holder.gateway.http.post(f"{caller.location}/hangup")).status_code == 200
        await holder.all_gone()
    async with calling(holder.gateway.http) as caller:
        away = neighbour("postgresql://nobody@127.0.0.1:9/nothing")
        async with running(**settings, **away) as fourth:
            session = f"{LIVE}/live_{'a' * 14}_{'a' * 24}"
            answer = await fourth.http.post(f"{session}/hangup", headers=bearer("alice"))
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
            assert (await fourth.http.post(f"{caller.location}/hangup", headers=bearer("alice"))).status_code == 200
    await holder.all_gone()


async def test_a_gateway_that_stops_is_no_longer_listed(database: str, two: object) -> None:
    engine = create_engine(make_url(database).set(drivername="postgresql+psycopg"))

    def urls() -> set[str]:
        with engine.begin() as connection:
            return set(connection.execute(select(neighbours.c.url)).scalars())

    try:
        with listed(database, "http://127.0.0.1:9", is_there=False):
            settings = neighbour(database)
            async with running(**settings):
                assert settings["own_url"] in urls()
                assert "http://127.0.0.1:9" not in urls()
            assert settings["own_url"] not in urls()
    finally:
        engine.dispose()


async def test_a_page_of_another_site_has_no_sideband(database: str) -> None:
    async with running(**neighbour(database)) as first, running(**neighbour(database)) as second, live(first) as client:
        path = f"{LIVE}/{client.started['id']}"
        with pytest.raises(InvalidStatus) as refused:
            async with connected(second, f"{path}/attach", origin="https://shop.example"):
                pass
        assert refused.value.response.status_code == 403
        foreign = {"origin": "https://shop.example"}
        assert (await second.http.post(f"{path}/hangup", headers=foreign)).status_code == 403
        async with connected(second, f"{path}/attach", origin=second.url) as sideband:  # its own page
            await sideband.until("session.started")


async def test_without_its_own_url_a_gateway_keeps_what_it_has(database: str) -> None:
    url: dict[str, Any] = {"database_url": database}
    async with running(**url) as first, running(**url) as second, live(first) as client:
        assert len(client.started["id"]) == len("live_") + 24
        assert (await second.http.post(f"{LIVE}/{client.started['id']}/hangup")).status_code == 404
        assert (await first.http.post(f"{LIVE}/{client.started['id']}/hangup")).status_code == 200


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://10.0.0.11:8000", "http://10.0.0.11:8000"),
        ("http://gateway-1:8000/", "http://gateway-1:8000"),
        ("http://fd00::7:8000", "http://[fd00::7]:8000"),  # an overlay knows only that it is an address
        ("http://[fd00::7]:8000", "http://[fd00::7]:8000"),
        ("http://gateway", None),
        ("https://gateway:8000", None),
        ("gateway:8000", None),
        ("http://gateway:8000/v1", None),
    ],
)
async def test_an_own_url(given: str, meant: str | None) -> None:
    if meant is None:
        with pytest.raises(ValidationError, match="write it as http://HOST:PORT"):
            GatewaySettings(pipeline=SPEECH, own_url=given)
    else:
        assert GatewaySettings(pipeline=SPEECH, own_url=given).own_url == meant
