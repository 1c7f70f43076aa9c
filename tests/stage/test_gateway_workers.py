"""A gateway of several processes is one gateway: limits, what it remembers, its metrics, its end."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from gateway.http.workers.router import METRICS_KEPT_S
from tests.support.scripted.script import Script
from tests.support.scripted.stages import ScriptedStages, scripted_stages
from tests.support.systems import workers
from tests.support.systems.gateway import SPEECH
from tests.support.systems.workers import ALICE, BOB, TRIES, WORKERS

BODY = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "wav"}}


@dataclass
class Gateway(workers.Gateway):
    """One that runs before scripted stages."""

    stages: ScriptedStages

    @asynccontextmanager
    async def held(self, path: str, body: dict, key: str = BOB) -> AsyncIterator[tuple[httpx.Response, Script]]:
        """A stream that stands still after its first events."""
        thinker = self.stages.scripts["thinker"]
        thinker.hold, thinker.after = True, 2
        thinker.holding.clear()
        thinker.release.clear()
        async with httpx.AsyncClient(base_url=self.url, timeout=60, verify=False) as client:
            headers = {"authorization": f"Bearer {key}"}
            async with client.stream("POST", path, json=body | {"stream": True}, headers=headers) as answer:
                await thinker.holding.wait()
                thinker.hold = False
                yield answer, thinker


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with scripted_stages() as stages, workers.workers_before(SPEECH, stages.addresses, tmp_path) as running:
        yield Gateway(running.url, running.process, stages)


async def test_several_processes_are_one_gateway(gateway: Gateway):
    # what one remembers, all know: a spoken answer's transcript, a response, a client secret
    first = (await gateway.ask("POST", "/v1/chat/completions", json=BODY | SPOKEN)).json()
    said = {"role": "assistant", "audio": {"id": first["choices"][0]["message"]["audio"]["id"]}}
    turn = BODY | {"messages": [*BODY["messages"], said, {"role": "user", "content": "And?"}]}
    assert {answer.status_code for answer in await gateway.everywhere("POST", "/v1/chat/completions", json=turn)} == {
        200
    }

    made = (await gateway.ask("POST", "/v1/responses", json={"model": "scripted", "input": "Hello"})).json()
    found = await gateway.everywhere("GET", f"/v1/responses/{made['id']}")
    assert {answer.json()["id"] for answer in found} == {made["id"]}

    turns = gateway.url.replace("http", "ws", 1) + "/v1/responses"
    bearer = {"authorization": f"Bearer {BOB}"}
    for _ in range(TRIES // 4):
        async with connect(turns, additional_headers=bearer) as socket:
            create = {
                "type": "response.create",
                "model": "scripted",
                "previous_response_id": made["id"],
                "input": "Go on",
            }
            await socket.send(json.dumps(create))
            while (event := json.loads(await socket.recv()))["type"] != "response.completed":
                assert event["type"].startswith("response."), event
    with pytest.raises(InvalidStatus):
        await connect(turns, additional_headers={"authorization": "Bearer x"})

    secret = (await gateway.ask("POST", "/v1/realtime/client_secrets", json={})).json()["value"]
    address = gateway.url.replace("http", "ws", 1) + "/v1/realtime"
    for _ in range(TRIES // 4):
        async with connect(address, additional_headers={"authorization": f"Bearer {secret}"}) as socket:
            assert "session.created" in str(await socket.recv())
    with pytest.raises(InvalidStatus):
        await connect(address, additional_headers={"authorization": f"Bearer {secret[:-1]}"})

    # a key's limit is that of all together
    async with gateway.held("/v1/chat/completions", BODY, ALICE) as (answer, thinker):
        refusals = await gateway.everywhere("POST", "/v1/chat/completions", ALICE, json=BODY)
        assert {refused.status_code for refused in refusals} == {429}
        thinker.release.set()
        assert (await answer.aread()).endswith(b"[DONE]\n\n")
    assert (await gateway.ask("POST", "/v1/chat/completions", ALICE, json=BODY)).status_code == 200

    # the metrics of all, whoever is asked; and a request's span, whoever served it
    await asyncio.sleep(METRICS_KEPT_S)
    page = (await gateway.ask("GET", "/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    served = [
        sample
        for sample in families["quartet_gateway_requests"].samples
        if sample.labels["path"] == "/v1/chat/completions" and sample.labels["status"] == "200"
    ]
    assert {sample.labels["worker"] for sample in served} == {"0", "1"}
    assert sum(sample.value for sample in served) == TRIES + 3
    assert sum(sample.value for sample in families["quartet_gateway_replicas"].samples) == 3
    for trace in await gateway.everywhere("GET", f"/v1/quartet/trace/{first['id']}"):
        assert "gateway" in [span["stage"] for span in trace.json()["spans"]]

    # a supervisor that is killed leaves no process, and the next one to start removes its files
    workers = gateway.processes()
    assert len(workers) == WORKERS
    os.kill(gateway.process.pid, signal.SIGKILL)
    _, alive = await asyncio.to_thread(psutil.wait_procs, workers, 60)
    assert not alive


async def test_a_process_that_is_killed_is_started_anew_and_the_others_go_on(gateway: Gateway):
    async with gateway.held("/v1/chat/completions", BODY) as (answer, thinker):
        serving = gateway.process_of(answer)
        victim = next(each for each in gateway.processes() if each != serving)
        victim.kill()
        await asyncio.to_thread(victim.wait, 60)
        health = gateway.stages.infos["thinker"]
        health.answers_checks.clear()
        async with asyncio.timeout(120):
            while health.waiting < WORKERS:
                await asyncio.sleep(0.05)
        answers = await gateway.everywhere("POST", "/v1/chat/completions", json=BODY)
        assert {each.status_code for each in answers} == {200}  # it takes no connection before it knows its stages
        assert {each.status_code for each in await gateway.everywhere("GET", "/ready")} == {200}
        health.answers_checks.set()
        await gateway.all_listen()
        thinker.release.set()
        assert (await answer.aread()).endswith(b"[DONE]\n\n")

    # SIGTERM: what is under way is finished first
    async with gateway.held("/v1/chat/completions", BODY) as (answer, thinker):
        gateway.process.send_signal(signal.SIGTERM)
        thinker.release.set()
        assert (await answer.aread()).endswith(b"[DONE]\n\n")
    assert await gateway.process.wait() == 0
