"""Sessions belong to API keys, and what a key has begun ends with it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from websockets.asyncio.client import connect

from gateway.access.api_keys import new_key
from tests.pure.test_api_keys import ASK, bearer, counted, entry, write
from tests.pure.test_realtime_transcribing import EVENTS, commit, manual
from tests.support.clients.realtime_client import TONE, RealtimeClient, session
from tests.support.clock import put_forward
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ALICE, BOB, CAROL, DAVE = [new_key() for _ in range(4)]
OTHERS = (
    entry("bob", BOB, requests_per_minute=2),
    entry("carol", CAROL),
    entry("dave", DAVE, max_realtime_sessions=1),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_keys(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Running, Path]]:
    file = write(tmp_path_factory.mktemp("keys") / "keys.yaml", entry("alice", ALICE), *OTHERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.access.api_keys.CHECK_INTERVAL_S", 0.02)
        async with running(api_keys_file=file, max_realtime_sessions=8) as gateway:
            yield gateway, file


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(with_keys: tuple[Running, Path]) -> AsyncIterator[Running]:
    yield with_keys[0]
    await with_keys[0].reset()


def opened(gateway: Running, key: str):
    return session(gateway, additional_headers=bearer(key))


async def first_event(gateway: Running, key: str) -> tuple[dict, int | None]:
    """The first event of a session, and the code that the server closes it with; None: it stays open."""
    url = f"{gateway.url.replace('http', 'ws')}/v1/realtime?model=scripted"
    async with connect(url, additional_headers=bearer(key), open_timeout=60) as socket:
        event = json.loads(await socket.recv())
        if event["type"] != "error":
            return event, None
        await socket.wait_closed()
        return event, socket.close_code


async def test_a_key_has_a_quarter_of_all_sessions_or_as_many_as_its_entry_says(gateway: Running) -> None:
    async with opened(gateway, CAROL), opened(gateway, CAROL), opened(gateway, DAVE):
        for key, message in ((CAROL, "'carol' has 2 sessions"), (DAVE, "'dave' has 1 sessions")):
            refused, code = await first_event(gateway, key)
            assert (refused["error"]["code"], code) == ("rate_limit_exceeded", 1013)
            assert message in refused["error"]["message"]
        assert (await first_event(gateway, ALICE))[0]["type"] == "session.created"
    await gateway.until(lambda: gateway.app.state.gateway.realtime_sessions == 0)
    assert (await first_event(gateway, CAROL))[0]["type"] == "session.created"


async def test_a_transcript_counts_if_no_answer_follows_the_sound(gateway: Running) -> None:
    async with opened(gateway, BOB) as client:
        await manual(client)
        kinds = []
        for _ in range(4):
            await commit(client, TONE)
            kinds += [await end_of_transcript(client)]
        assert kinds == ["completed"] * 3 + ["failed"]  # the first one's answer may follow, and two a minute


async def end_of_transcript(client: RealtimeClient) -> str:
    while True:
        event = await client.event()
        if event["type"] in (f"{EVENTS}.completed", f"{EVENTS}.failed"):
            return event["type"].rpartition(".")[2]


async def test_what_a_removed_key_has_begun_ends(with_keys: tuple[Running, Path]) -> None:
    gateway, file = with_keys
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 1
    headers = bearer(ALICE)
    whole = asyncio.create_task(gateway.chat(ASK, headers=headers))
    stream = asyncio.create_task(gateway.chat(ASK | {"stream": True}, headers=headers))
    carols = asyncio.create_task(gateway.chat(ASK, headers=bearer(CAROL)))
    body = {"model": "scripted", "input": "hi", "background": True}
    background = (await gateway.http.post("/v1/responses", json=body, headers=headers)).json()["id"]
    async with opened(gateway, ALICE) as client:
        await client.say("hi")
        await client.send("response.create")
        await gateway.until(lambda: thinker.running == 5)
        write(file, *OTHERS)
        async with asyncio.timeout(60):
            await client.socket.wait_closed()
        assert client.socket.close_code == 1008
    answer = await whole
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(httpx.RemoteProtocolError):
        await stream
    await gateway.until(lambda: thinker.running == 1)  # carol's
    thinker.go_on()
    assert (await carols).status_code == 200
    write(file, entry("alice", ALICE), *OTHERS)
    async with asyncio.timeout(60):
        while (found := await gateway.http.get(f"/v1/responses/{background}", headers=headers)).status_code == 401:
            await asyncio.sleep(0.02)
    assert found.json()["status"] == "cancelled"
    assert counted("quartet_gateway_key_running_requests", key="alice") == 0
    await gateway.reset()


async def test_a_session_in_which_nothing_happens_ends() -> None:
    async with running(realtime_idle_s=100) as gateway, session(gateway) as client:
        thinker = gateway.scripts["thinker"]
        thinker.hold = True
        await client.say("hi")
        await client.send("response.create")
        await thinker.holding.wait()
        put_forward(101)
        thinker.go_on()
        done = (await client.until("response.done"))[-1]  # an answer keeps it
        assert done["response"]["status"] == "completed"
        put_forward(101)
        last = (await client.until("error"))[-1]
        assert last["error"]["code"] == "session_idle"
