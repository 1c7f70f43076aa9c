"""Responses and conversations that are kept: on disk, within bounds, for their key only."""

import asyncio
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import select

from gateway.access.api_keys import new_key
from gateway.dialects.responses.items import new_id
from gateway.dialects.responses.store import ResponseStore, Thread
from gateway.dialects.responses.tables import items
from tests.pure.test_api_keys import bearer, entry, write
from tests.support.clients.responses import create, prompt
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running, running
from tests.support.systems.postgres import Place

ALICE, BOB = new_key(), new_key()
TEXT = "".join(PIECES)


def thread(name: str = "", previous: str | None = None) -> Thread:
    return Thread(name or new_id("resp"), int(time.time()), previous, {"status": "completed"})


def said(text: str) -> dict[str, Any]:
    return {"id": new_id("msg"), "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


async def test_who_has_most_loses_what_is_longest_unused(place: Place) -> None:
    async with ResponseStore(place(), ttl_s=1000, max_bytes=22_000) as store:
        mine = thread()
        await store.put(mine, "small", [said("x" * 500)])
        first, second = thread(), thread()
        for each in (first, second):
            await store.put(each, "large", [said("x" * 8_000)])
        assert await store.turns(first.id, "large")  # it counts as used
        await store.put(third := thread(), "large", [said("x" * 8_000)])
        left = [await store.get(each.id, None) is not None for each in (mine, first, second, third)]
        assert left == [True, True, False, True]
        assert await store.items(second.id) == []
        await store.put(huge := thread(), "large", [said("x" * 30_000)])
        assert await store.get(huge.id, "large") is None  # larger than all that is kept
        assert await store.get(mine.id, "small") is not None


async def test_what_nobody_answers_to_expires(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ResponseStore(place(), ttl_s=100, max_bytes=22_000) as store:
        await store.put(first := thread(), None, [said("a")])
        await store.put(second := thread(previous=first.id), None, [said("b")])
        now = time.time()
        monkeypatch.setattr("time.time", lambda: now + 60)
        assert [item["content"][0]["text"] for item in await store.turns(second.id, None) or ()] == ["a", "b"]
        monkeypatch.setattr("time.time", lambda: now + 120)  # the turn before was used with it
        assert await store.turns(second.id, None)
        monkeypatch.setattr("time.time", lambda: now + 300)
        assert await store.get(second.id, None) is None
        await store.put(thread(), None)
        assert not await store.read(lambda connection: connection.execute(select(items)).all())


async def test_a_key_sees_its_own_and_another_gateway_goes_on(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.yaml", entry("alice", ALICE), entry("bob", BOB))
    kept = tmp_path / "responses"
    async with running(api_keys_file=keys, responses_dir=kept) as gateway:
        made = await create(gateway, extra_headers=bearer(ALICE))
        body = {"model": "scripted", "input": [{"type": "item_reference", "id": made.output[0].id}]}
        for method, path, sent in (
            ("GET", f"/v1/responses/{made.id}", None),
            ("DELETE", f"/v1/responses/{made.id}", None),
            ("POST", f"/v1/responses/{made.id}/cancel", None),
            ("GET", f"/v1/responses/{made.id}/input_items", None),
            ("POST", "/v1/responses", body),
        ):
            refused = await gateway.http.request(method, path, json=sent, headers=bearer(BOB))
            assert refused.status_code == 404, path
    async with running(api_keys_file=keys, responses_dir=kept) as gateway:
        await create(gateway, "more", previous_response_id=made.id, extra_headers=bearer(ALICE))
        assert prompt(gateway) == [("user", "hi"), ("assistant", TEXT), ("user", "more")]
        with pytest.raises(openai.BadRequestError):
            await create(gateway, "more", previous_response_id=made.id, extra_headers=bearer(BOB))


async def test_what_a_gateway_of_before_leases_left_unfinished_is_told_as_failed(tmp_path: Path) -> None:
    async with ResponseStore(tmp_path, ttl_s=1000, max_bytes=22_000) as store:
        lost = Thread(new_id("resp"), 0, None, {"status": "in_progress", "background": True})
        await store.put(lost, None)
    async with running(responses_dir=tmp_path) as gateway:
        told = (await gateway.http.get(f"/v1/responses/{lost.id}")).json()
        assert (told["status"], told["error"]["code"]) == ("failed", "server_error")
        followed = await gateway.http.get(f"/v1/responses/{lost.id}?stream=true")
        assert (followed.status_code, followed.json()["error"]["param"]) == (400, "stream")


async def test_a_directory_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "responses.sqlite").write_text("no database")
    async with running(responses_dir=tmp_path) as gateway:
        asked = await gateway.http.post("/v1/responses", json={"model": "scripted", "input": "hi"})
        assert (asked.status_code, asked.json()["error"]["code"]) == (500, "storage_failed")
        asked = await gateway.http.post("/v1/responses", json={"model": "scripted", "input": "hi", "background": True})
        assert (asked.status_code, asked.json()["error"]["code"]) == (500, "storage_failed")
        assert gateway.app.state.gateway.admission.in_flight == 0
        not_stored = await create(gateway, store=False)
        assert not_stored.output_text == TEXT


async def test_a_gateway_that_stops_keeps_what_it_has_of_the_background(tmp_path: Path) -> None:
    async with running(responses_dir=tmp_path, drain_timeout_s=0.1) as gateway:
        made = await _held(gateway)
    async with ResponseStore(tmp_path, ttl_s=1000, max_bytes=22_000) as store:
        kept = await store.get(made, None)
        assert kept is not None
        assert kept.body["status"] == "cancelled"
        (message,) = await store.items(made, output=True)
        assert message["content"][0]["text"] == "".join(PIECES[:1])


async def _held(gateway: Running) -> str:
    """A response of the background whose thinker stands still after its first word."""
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 2
    made = await create(gateway, background=True)
    await asyncio.wait_for(thinker.holding.wait(), 60)
    await gateway.until(lambda: gateway.app.state.responses.background.get(made.id).run.output)
    return made.id


async def test_rows_count_as_bytes_and_give_them_back(place: Place) -> None:
    """Small rows and wide characters fill a store, too; what is removed makes room."""
    async with ResponseStore(place(), ttl_s=1000, max_bytes=22_000) as store:
        empty = [thread() for _ in range(60)]
        for each in empty:
            await store.put(each, "small")
        kept = [each for each in empty if await store.get(each.id, "small")]
        assert len(kept) * 512 <= 22_000
        wide = said("\u4e2d" * 2_000)  # 6,000 bytes
        conversation = thread()
        await store.put(conversation, "wide", [wide | {"id": "one"}])
        assert len([each for each in empty if await store.get(each.id, "small")]) < len(kept)
        for _ in range(5):  # what is removed counts no more
            await store.remove_item(conversation.id, "one")
            await store.add(conversation.id, [wide | {"id": "one"}])
        assert await store.item_of(conversation.id, "one") is not None


async def test_pages_of_items(place: Place) -> None:
    async with ResponseStore(place(), ttl_s=1000, max_bytes=22_000) as store:
        talk = thread()
        await store.put(talk, None, [said("x") | {"id": f"i{n}"} for n in range(5)])

        async def ids(after: str | None, limit: int, order: str) -> list[str] | None:
            page = await store.page(talk.id, after, limit, order)
            return None if page is None else [item["id"] for item in page]

        assert await ids(None, 2, "asc") == ["i0", "i1"]
        assert await ids("i1", 9, "asc") == ["i2", "i3", "i4"]
        assert await ids("i3", 2, "desc") == ["i2", "i1"]
        assert await ids("i4", 2, "asc") == []
        assert await ids("other", 2, "asc") is None
