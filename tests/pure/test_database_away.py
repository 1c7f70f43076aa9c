"""The database of gateways is stopped: what needs it says so, the rest goes on, and all is as before afterwards."""

import asyncio
from contextlib import AsyncExitStack

from tests.support.clients.responses import create
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running, running
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
