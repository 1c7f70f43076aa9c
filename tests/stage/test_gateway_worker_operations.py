"""Each process of a gateway loads adapters, takes profiles, and cancels what another one makes."""

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from quartet.v1 import profile_pb2_grpc
from services.common.profiles import Profiles, Trace
from services.common.telemetry.spans import Spans
from tests.support.scripted.script import Script
from tests.support.scripted.stages import ScriptedStages, scripted_stages
from tests.support.systems import workers

CHAT, GENERATE, RESPONSES = "/v1/chat/completions", "/inference/v1/generate", "/v1/responses"
ASK = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}
RAW = {"model": "scripted", "token_ids": [1, 2], "sampling_params": {}, "request_id": "mine", "stream": True}
Clients = Sequence[httpx.AsyncClient]


class NoEngine:
    """Has nothing to record."""

    async def start(self) -> None:
        pass

    async def stop(self, directory: Path) -> Sequence[Trace]:
        return []


class ProfiledStages(ScriptedStages):
    def add_more(self, stage, server) -> None:
        profiles = Profiles(stage, Spans())
        profiles.recorder = NoEngine()
        profile_pb2_grpc.add_ProfileServiceServicer_to_server(profiles, server)


@dataclass
class Gateway(workers.Gateway):
    """One that runs before a thinker."""

    thinker: Script


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with (
        scripted_stages("thinker", of=ProfiledStages) as stages,
        workers.workers_before("text", stages.addresses, tmp_path) as running,
    ):
        yield Gateway(running.url, running.process, stages.scripts["thinker"])


async def test_whatever_one_begins_another_can_end(gateway: Gateway):
    async with gateway.connections() as connections:
        clients = list(connections.values())
        for pair in (clients, clients[::-1]):
            await _load_an_adapter(*pair)
            await _take_a_profile(*pair)
            await _abort_a_generation(gateway.thinker, *pair)
            await _cancel_a_response(gateway.thinker, *pair)
        await _load_and_unload_at_once(clients)
        for secret in ({}, {"x-quartet-worker": "0" * 32}):  # only workers tell workers
            told = await clients[0].post("/workers/check_stage", json="thinker", headers=secret)
            assert told.status_code == 404


async def _load_an_adapter(first: httpx.AsyncClient, second: httpx.AsyncClient) -> None:
    """All know of it when it is answered."""
    loaded = await first.post("/v1/load_lora_adapter", json={"lora_name": "sea", "lora_path": "sailors"})
    assert loaded.status_code == 200
    for client in (second, first):
        assert (await client.post(CHAT, json=ASK | {"model": "sea"})).status_code == 200
    assert (await second.post("/v1/unload_lora_adapter", json={"lora_name": "sea"})).status_code == 200
    for client in (first, second):
        assert (await client.post(CHAT, json=ASK | {"model": "sea"})).status_code == 404
    assert (await first.post("/v1/unload_lora_adapter", json={"lora_name": "sea"})).status_code == 404


async def _load_and_unload_at_once(clients: Clients) -> None:
    """One after the other, whoever begins."""
    adapter = {"lora_name": "sea", "lora_path": "sailors"}
    for _ in range(5):
        both = [client.post("/v1/load_lora_adapter", json=adapter) for client in clients]
        assert [answer.status_code for answer in await asyncio.gather(*both)] == [200, 200]
        both = [client.post("/v1/unload_lora_adapter", json={"lora_name": "sea"}) for client in clients]
        assert sorted(answer.status_code for answer in await asyncio.gather(*both)) == [200, 404]


async def _take_a_profile(first: httpx.AsyncClient, second: httpx.AsyncClient) -> None:
    """It has the requests of all."""
    assert (await first.post("/start_profile")).json()["stages"]["thinker"]
    again = await second.post("/start_profile")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "profile_running")
    for client, name in ((first, "one"), (second, "two")):
        assert (await client.post(CHAT, json=ASK, headers={"x-request-id": name})).status_code == 200
    stopped = await second.post("/stop_profile")
    with tarfile.open(fileobj=io.BytesIO(stopped.content)) as archive:
        manifest = archive.extractfile("profile.json")
        assert manifest is not None
        described = {process["stage"]: process for process in json.loads(manifest.read())["processes"]}
    assert {"one", "two"} <= {span["request_id"] for span in described["gateway"]["spans"]}
    assert described["thinker"]["ended_by"] == "stopped"
    for client in (first, second):
        none = await client.post("/stop_profile")
        assert (none.status_code, none.json()["error"]["code"]) == (409, "no_profile")


async def _abort_a_generation(thinker: Script, first: httpx.AsyncClient, second: httpx.AsyncClient) -> None:
    """Its id is in use at all workers until it has ended."""
    thinker.hold, thinker.after = True, 2
    async with first.stream("POST", GENERATE, json=RAW) as generated:
        await thinker.holding.wait()
        refused = await second.post(GENERATE, json=RAW | {"stream": False})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")
        ids = {"request_ids": ["mine", "no other"]}
        assert (await second.post("/inference/v1/abort_requests", json=ids)).json() == {}
        events = (await generated.aread()).decode().split("\n\n")
    last = json.loads(events[-3].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "abort"
    await thinker.reset()
    assert (await second.post(GENERATE, json=RAW | {"stream": False})).status_code == 200


async def _cancel_a_response(thinker: Script, first: httpx.AsyncClient, second: httpx.AsyncClient) -> None:
    thinker.hold, thinker.after = True, 2
    body = {"model": "scripted", "input": "Hello", "background": True}
    begun = (await first.post(RESPONSES, json=body)).json()
    await thinker.holding.wait()
    assert (await second.post(f"{RESPONSES}/{begun['id']}/cancel")).json()["status"] == "cancelled"
    for client in (first, second):
        assert (await client.get(f"{RESPONSES}/{begun['id']}")).json()["status"] == "cancelled"
    await thinker.reset()
