"""What vLLM's users look up of a server."""

import asyncio
from importlib.metadata import version

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK = {"model": "scripted", "prompt": "Once"}


async def test_its_version_and_its_load(speech_gateway) -> None:
    thinker, http = speech_gateway.scripts["thinker"], speech_gateway.http
    assert (await http.get("/version")).json() == {"version": version("quartet")}
    assert (await http.get("/load")).json() == {"server_load": 0}
    thinker.hold = True
    asking = asyncio.create_task(http.post("/v1/completions", json=ASK))
    await thinker.holding.wait()
    assert (await http.get("/load")).json() == {"server_load": 1}
    thinker.go_on()
    assert (await asking).status_code == 200
    assert (await http.get("/load")).json() == {"server_load": 0}
