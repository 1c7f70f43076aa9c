"""Videos at a gateway of several processes: each makes them, tells of them and removes them, and the limit is that of
all."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.scripted.script import Script
from tests.support.scripted.stages import scripted_stages
from tests.support.systems import workers
from tests.support.systems.video import MODEL, VIDEO_INFO, ScriptedDit, decode_mp4, scripted_dit

pytestmark = pytest.mark.long
PATH = "/v1/videos"
GUARD_S = 60
MAKE = {"model": MODEL, "prompt": "a boat"}
ASK = {"model": "scripted", "input": "A boat, please", "tools": [{"type": "video_generation"}]}


@dataclass
class Gateway(workers.Gateway):
    """One that runs before a thinker and a dit."""

    thinker: Script
    dit: ScriptedDit

    async def reaches(self, video_id: str, status: str) -> dict:
        async with asyncio.timeout(GUARD_S):
            while (video := (await self.ask("GET", f"{PATH}/{video_id}")).json())["status"] != status:
                await asyncio.sleep(0.1)
        return video


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    settings = {"jobs_dir": tmp_path / "jobs", "max_running_videos": 1, "hosted_tools": "video_generation"}
    async with (
        scripted_stages("thinker") as stages,
        scripted_dit(VIDEO_INFO) as dit,
        workers.workers_before("text-dit", {**stages.addresses, "dit": dit.address}, tmp_path, **settings) as running,
    ):
        yield Gateway(running.url, running.process, stages.scripts["thinker"], dit)


async def test_videos_are_those_of_all_workers(gateway: Gateway):
    async with gateway.connections() as clients:
        first, second = clients.values()
        await _all_have_all(gateway, first, second)
        await _all_make_what_a_model_asks_for(gateway, first, second)
        await gateway.dit.script.reset()
        await _one_is_killed(gateway, clients)


async def _all_have_all(gateway: Gateway, first: httpx.AsyncClient, second: httpx.AsyncClient) -> None:
    gateway.dit.script.hold = True
    gone, made = [(await client.post(PATH, json=MAKE)).json()["id"] for client in (first, second)]
    await gateway.dit.script.holding.wait()
    for client in (first, second):
        listed = (await client.get(PATH)).json()["data"]
        assert [video["id"] for video in listed] == [made, gone]
    assert (await first.get(f"{PATH}/{made}")).json()["status"] == "queued"
    assert (await second.delete(f"{PATH}/{gone}")).json()["deleted"]  # which the first one makes
    gateway.dit.script.hold = False
    await gateway.reaches(made, "completed")
    assert gateway.dit.script.ended == ["cancelled", "done"]
    for client in (first, second):
        assert len(decode_mp4((await client.get(f"{PATH}/{made}/content")).content)[0]) == 9
        assert (await client.get(f"{PATH}/{gone}")).status_code == 404
    assert gateway.dit.most == 1


async def _all_make_what_a_model_asks_for(
    gateway: Gateway, first: httpx.AsyncClient, second: httpx.AsyncClient
) -> None:
    for client, other in ((first, second), (second, first)):
        gateway.thinker.calls = [("video_generation", json.dumps({"prompt": "a boat"}))]
        answer = (await client.post("/v1/responses", json=ASK)).json()
        (call,) = [item for item in answer["output"] if item["type"] == "video_generation_call"]
        video = await gateway.reaches(call["video"]["id"], "completed")
        assert (await other.get(f"{PATH}/{video['id']}")).json() == video
        assert (await other.get(f"/v1/responses/{answer['id']}")).json()["output"] == answer["output"]


async def _one_is_killed(gateway: Gateway, clients: Mapping[psutil.Process, httpx.AsyncClient]) -> None:
    """What it makes fails once; the others go on."""
    (victim, first), (_, second) = clients.items()
    gateway.dit.script.hold = True
    lost = (await first.post(PATH, json=MAKE)).json()["id"]
    await gateway.dit.script.holding.wait()
    waiting = (await second.post(PATH, json=MAKE)).json()["id"]
    victim.kill()
    await asyncio.to_thread(victim.wait, GUARD_S)
    gateway.dit.script.hold = False
    await gateway.reaches(waiting, "completed")
    await gateway.all_listen()
    failed = await gateway.reaches(lost, "failed")
    assert failed["error"]["code"] == "interrupted"
    assert [answer.json() for answer in await gateway.everywhere("GET", f"{PATH}/{lost}")] == [failed] * workers.TRIES
    assert gateway.dit.script.ended == ["cancelled", "done"]
    assert gateway.dit.most == 1
