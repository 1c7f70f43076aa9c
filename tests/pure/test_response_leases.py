"""Responses in the background of several gateways: any of them follows, cancels and fails what another one makes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from gateway.dialects.responses.items import new_id
from gateway.dialects.responses.leases import REPLAY_S, Leases
from gateway.dialects.responses.store import ResponseStore, Thread
from gateway.dialects.responses.tables import events, threads
from tests.support.clients.responses import client, create
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running, running
from tests.support.systems.postgres import Place

TEXT = "".join(PIECES)


@pytest.fixture(params=["sqlite", "postgres"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings of gateways that share what they keep."""
    if request.param == "sqlite":
        yield {"responses_dir": tmp_path / "responses"}
    else:
        yield {"database_url": request.getfixturevalue("postgres_url")}


@pytest.fixture
async def two(shared: dict[str, Any]) -> AsyncIterator[tuple[Running, Running]]:
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(running(**shared)) for _ in range(2)]
        yield first, second


async def held(gateway: Running, **members: Any) -> Any:
    """A response in the background, whose thinker stands still in its middle."""
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 2
    made = await create(gateway, background=True, **members)
    await thinker.holding.wait()
    return made


async def test_another_gateway_follows_a_response(two: tuple[Running, Running]) -> None:
    maker, other = two
    made = await held(maker)
    assert (await client(other).responses.retrieve(made.id)).status in ("queued", "in_progress")
    follower = await client(other).responses.retrieve(made.id, stream=True)
    seen: list[Any] = []
    async for event in follower:
        seen.append(event)
        if event.type == "response.output_text.delta":
            maker.scripts["thinker"].go_on()
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    at_maker = [event async for event in await client(maker).responses.retrieve(made.id, stream=True)]
    assert [event.model_dump() for event in seen] == [event.model_dump() for event in at_maker]
    for gateway in two:
        assert (await client(gateway).responses.retrieve(made.id)).output_text == TEXT
    more = await create(other, "more", previous_response_id=made.id)
    assert more.output_text == TEXT


async def test_another_gateway_cancels_and_removes_a_response(two: tuple[Running, Running]) -> None:
    maker, other = two
    made = await held(maker)
    cancelled = await client(other).responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    await maker.until(lambda: maker.scripts["thinker"].ended == ["cancelled"])
    await maker.until(lambda: maker.app.state.gateway.admission.in_flight == 0)
    maker.scripts["thinker"].go_on()
    removed = await held(maker)
    await client(other).responses.delete(removed.id)
    for gateway in two:
        answer = await gateway.http.get(f"/v1/responses/{removed.id}")
        assert answer.status_code == 404


async def test_a_lease_that_is_over_ends_a_response_once(place: Place) -> None:
    """Whoever comes later, the gateway that stood still or another one that looks, changes nothing."""
    thread = Thread(new_id("resp"), 0, None, {"status": "in_progress", "background": True})
    async with ResponseStore(place(), 1000, 10**6) as slow, ResponseStore(place(), 1000, 10**6) as quick:
        stood, lives = Leases(slow, "stood"), Leases(quick, "lives")
        await stood.begin(thread, "ann", [])
        assert await lives.end_lost() == 0
        assert await stood.renew([thread.id]) == {thread.id: False}
        assert await lives.renew([thread.id]) == {}
        await stood.publish(thread.id, thread.body, [{"type": "response.created", "sequence_number": 0}])
        await _set(quick, thread, held_until=0.0)
        assert sorted(await asyncio.gather(lives.end_lost(), stood.end_lost())) == [0, 1]
        completed = Thread(thread.id, 0, None, {"status": "completed"})
        said = [{"id": "msg_1", "type": "message"}]
        assert not await stood.finish(completed, [], said, None)
        assert await stood.renew([thread.id]) == {}
        found = await quick.get(thread.id, "ann")
        assert found is not None
        assert (found.body["status"], found.body["error"]["code"], found.holder) == ("failed", "server_error", None)
        assert await quick.items(thread.id, output=True) == []
        seen, is_more = await lives.events_after(thread.id, -1)
        assert [(event["type"], event["sequence_number"]) for event in seen] == [
            ("response.created", 0),
            ("response.failed", 1),
        ]
        assert not is_more
        assert await quick.get(thread.id, "bob") is None


async def test_events_are_kept_for_a_while(place: Place) -> None:
    thread = Thread(new_id("resp"), 0, None, {"status": "in_progress", "background": True})
    async with ResponseStore(place(), 1000, 10**6) as store:
        leases = Leases(store, "one")
        await leases.begin(thread, None, [])
        assert await leases.finish(Thread(thread.id, 0, None, {"status": "completed"}), [], [], None)
        assert not await leases.finish(Thread(thread.id, 0, None, {"status": "completed"}), [], [], None)
        assert (await leases.events_after(thread.id, -1)) == ([], True)  # its last events are on their way
        last = {"type": "response.completed", "sequence_number": 0}
        await leases.publish_end(thread.id, [last])
        assert (await leases.events_after(thread.id, -1)) == ([last], False)
        await leases.end_lost()
        assert (await leases.events_after(thread.id, -1))[0] == [last]
        await _set(store, thread, held_until=threads.c.held_until - REPLAY_S - 1)
        await leases.end_lost()
        assert (await leases.events_after(thread.id, -1)) == ([], False)
        assert not await store.read(lambda connection: connection.execute(events.select()).all())


async def test_a_gateway_that_has_lost_a_response_ends_its_work(two: tuple[Running, Running]) -> None:
    maker, other = two
    made = await held(maker)
    store, leases = other.app.state.responses.store, other.app.state.responses.background.leases
    while (thread := await store.get(made.id, None)).holder is not None:  # its gateway may renew it in between
        await _set(store, thread, held_until=0.0)
        await leases.end_lost()
    await maker.until(lambda: maker.scripts["thinker"].ended == ["cancelled"])
    for gateway in two:
        assert (await client(gateway).responses.retrieve(made.id)).status == "failed"


async def test_events_are_kept_once_and_none_behind_the_last(place: Place) -> None:
    """Also if the answer to a try was lost, and by a gateway that stood still while another one ended its response."""
    made = [{"type": f"response.{kind}", "sequence_number": i} for i, kind in enumerate("abcd")]
    body: dict[str, Any] = {"status": "in_progress", "background": True}
    ended, lost = [Thread(new_id("resp"), 0, None, body) for _ in range(2)]
    async with ResponseStore(place(), 1000, 10**6) as store:
        leases = Leases(store, "one")
        for thread in (ended, lost):
            await leases.begin(thread, None, [])
            assert await leases.publish(thread.id, body, made[:2])
        assert await leases.publish(ended.id, body, made[1:3])
        assert await leases.finish(Thread(ended.id, 0, None, body | {"status": "completed"}), [], [], None)
        assert not await leases.publish(ended.id, body, made[3:])
        last = {"type": "response.completed", "sequence_number": 4}
        for _ in range(2):
            await leases.publish_end(ended.id, [*made[2:], last])
        assert await leases.events_after(ended.id, -1) == ([*made, last], False)

        await _set(store, lost, held_until=0.0)
        assert (await leases.events_after(lost.id, -1))[1]  # its end is still to come
        assert await leases.end_lost() == 1
        await leases.publish_end(lost.id, [*made[2:], last])
        seen, is_more = await leases.events_after(lost.id, -1)
        assert [event["type"] for event in seen] == ["response.a", "response.b", "response.failed"]
        assert not is_more


@pytest.mark.parametrize("way", ["by its gateway", "by another one"])
async def test_a_response_whose_end_is_being_stored_is_not_cancelled(
    two: tuple[Running, Running], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    maker, other = two
    finish, renew = Leases.finish, Leases.renew
    is_stored, goes_on, looks = asyncio.Event(), asyncio.Event(), 0

    async def slow(self: Leases, *arguments: Any) -> bool:
        """The database has it, and its answer is on its way."""
        is_mine = await finish(self, *arguments)
        is_stored.set()
        await goes_on.wait()
        return is_mine

    async def counted(self: Leases, *arguments: Any) -> dict[str, bool]:
        nonlocal looks
        looks += 1
        return await renew(self, *arguments)

    monkeypatch.setattr(Leases, "finish", slow)
    monkeypatch.setattr(Leases, "renew", counted)
    made = await create(maker, background=True)
    await is_stored.wait()
    asked = maker if way == "by its gateway" else other
    cancelling = asyncio.create_task(client(asked).responses.cancel(made.id))
    before = looks
    await maker.until(lambda: looks >= before + 3)  # the gateway has looked at its leases, and published, in between
    goes_on.set()
    assert (await cancelling).status == "completed"
    seen = [[event async for event in await client(each).responses.retrieve(made.id, stream=True)] for each in two]
    assert [event.model_dump() for event in seen[0]] == [event.model_dump() for event in seen[1]]
    assert [event.sequence_number for event in seen[0]] == list(range(len(seen[0])))
    assert seen[0][-1].type == "response.completed"


async def _set(store: ResponseStore, thread: Thread, **values: Any) -> None:
    await store.write(lambda db: db.execute(update(threads).where(threads.c.id == thread.id).values(values)))


async def test_an_id_of_any_characters_is_unknown(two: tuple[Running, Running]) -> None:
    for path in ("responses/resp_%00", "conversations/conv_%00", "files/file-%00"):
        answer = await two[0].http.get(f"/v1/{path}")
        assert answer.status_code == 404, answer.text
    body = {"model": "scripted", "input": [{"type": "item_reference", "id": "msg_\0"}]}
    assert (await two[0].http.post("/v1/responses", json=body)).status_code == 404
    made = await create(two[0], "a zero: \0", metadata={"a": "\0"})
    assert (await client(two[1]).responses.retrieve(made.id)).metadata == {"a": "\0"}
