"""The database of gateways is stopped, or answers nothing: what needs it says so or waits, the rest goes on."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import select

from gateway.dialects.responses.tables import threads
from gateway.store import postgres
from gateway.store.postgres import PostgresDatabase
from tests.support.clients.realtime_client import session
from tests.support.clients.responses import create
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import SPEECH, Running, running
from tests.support.systems.postgres import own_server

TEXT = "".join(PIECES)
STORED = (
    ("POST", "/v1/responses", {"model": "scripted", "input": "hi"}),
    ("POST", "/v1/responses", {"model": "scripted", "input": "hi", "background": True}),
    ("GET", "/v1/responses/resp_1", None),
    ("POST", "/v1/conversations", {}),
    ("GET", "/v1/files", None),
)


async def chat(gateway: Running) -> str:
    made = await gateway.chat({"model": "scripted", "messages": [{"role": "user", "content": "hi"}]})
    assert made.status_code == 200, made.text
    return made.json()["choices"][0]["message"]["content"]


async def test_a_database_that_is_away() -> None:
    with own_server() as server:
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(running(database_url=server.get_uri()))
            kept = await create(gateway, store=True)
            thinker = gateway.scripts["thinker"]
            thinker.hold, thinker.after = True, 2
            background = await create(gateway, background=True)
            await thinker.holding.wait()
            await asyncio.to_thread(server.stop)
            thinker.go_on()  # its end waits for the database
            assert await chat(gateway) == TEXT
            for method, path, body in STORED:
                refused = await gateway.http.request(method, path, json=body)
                assert refused.status_code == 503, (path, refused.text)
                assert refused.json()["error"]["code"] == "storage_unavailable", path
                assert int(refused.headers["retry-after"]) > 0
            assert (await create(gateway, store=False)).output_text == TEXT
            later = await stack.enter_async_context(running(database_url=server.get_uri()))  # it starts all the same
            assert await chat(later) == TEXT
            await asyncio.to_thread(server.start)
            for each in (gateway, later):
                async with asyncio.timeout(120):
                    while (found := await each.http.get(f"/v1/responses/{kept.id}")).status_code == 503:
                        await asyncio.sleep(0.1)
                assert found.json()["output"][0]["content"][0]["text"] == TEXT
            async with asyncio.timeout(120):
                while (found := await later.http.get(f"/v1/responses/{background.id}")).json()["status"] not in (
                    "completed",
                    "failed",
                ):
                    await asyncio.sleep(0.1)
            assert found.json()["status"] == "completed"
            await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)


async def test_no_answer_waits_for_a_database_that_answers_nothing(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor asks it anything: chats, speech and sessions have no call to it, on the way or behind them, but for what a
    spoken answer said, which is kept after the answer."""
    answers, asked = threading.Event(), list[str]()
    transaction, run = PostgresDatabase.transaction, PostgresDatabase.run

    @contextmanager
    def slow(self: PostgresDatabase, writes: bool) -> Iterator[Any]:
        answers.wait()
        with transaction(self, writes) as connection:
            yield connection

    async def noted(self: PostgresDatabase, call: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        asked.append(cast("Coroutine[Any, Any, Any]", task.get_coro()).__qualname__)
        return await run(self, call)

    async with running(database_url=postgres_url) as gateway:
        kept = await create(gateway)
        monkeypatch.setattr(PostgresDatabase, "transaction", slow)
        monkeypatch.setattr(PostgresDatabase, "run", noted)
        try:
            waiting = asyncio.create_task(gateway.http.get(f"/v1/responses/{kept.id}"))
            for _ in range(20):
                assert await chat(gateway) == TEXT
            spoken = {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "pcm16"}}
            user = {"role": "user", "content": "hi"}
            for stream in (False, True):
                body = {"model": "scripted", "messages": [user], "stream": stream, **spoken}
                assert (await gateway.chat(body)).status_code == 200
            speech = {"model": "scripted", "input": "Hello.", "voice": "ethan"}
            assert (await gateway.http.post("/v1/audio/speech", json=speech)).status_code == 200
            async with session(gateway) as client:
                await client.say("hi")
                assert (await client.respond())[-1]["response"]["status"] == "completed"
            of_background = ("BackgroundRuns.", "BatchRunner.", "Transcripts._put", "VideoJobs.", "Files.")
            others = [name for name in asked if not name.startswith(of_background)]
            assert len(others) == 1, others  # the response that was asked for
            assert not waiting.done()
        finally:
            answers.set()
        assert (await waiting).json()["output"][0]["content"][0]["text"] == TEXT


async def test_who_waits_too_long_for_a_lock_may_try_again(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_LOCK_MS", 100)
    async with running(database_url=postgres_url) as gateway:
        kept = await create(gateway)
        url = f"/v1/responses/{kept.id}"
        with PostgresDatabase(postgres_url).transaction(writes=True) as other:
            other.execute(select(threads.c.id).where(threads.c.id == kept.id).with_for_update())
            refused = await gateway.http.delete(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_unavailable")
        assert int(refused.headers["retry-after"]) > 0
        assert (await gateway.http.delete(url)).status_code == 200


async def test_a_gateway_of_videos_starts_without_its_database(tmp_path: Path) -> None:
    nowhere = "postgresql://ann@127.0.0.1:1/quartet"
    async with running(SPEECH.with_name("dit.yaml"), database_url=nowhere, jobs_dir=tmp_path) as gateway:
        assert (await gateway.http.get("/ready")).status_code == 200
        refused = await gateway.http.get("/v1/videos")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_unavailable")
