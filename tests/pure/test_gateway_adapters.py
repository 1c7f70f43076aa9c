"""Adapters at the gateway: who may load them, where their requests go, and what a request that names one is told."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli.plan import PIPELINE
from gateway.access.api_keys import new_key
from gateway.app import create_app
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from quartet.v1 import server_info_pb2, server_info_pb2_grpc
from tests.pure.test_api_keys import bearer, entry, write
from tests.support.clients.realtime_client import session
from tests.support.scripted.stages import ScriptedStages, scripted_stages
from tests.support.systems.gateway import HEALTH_TIMEOUT_S, Running, running, serving

ASK = {"messages": [{"role": "user", "content": "hi"}]}
SEA = {"lora_name": "sea", "lora_path": "sailors"}


class TwoThinkers(Running):
    """A gateway before two replicas of the thinker."""

    other: ScriptedStages

    def asked(self) -> list[list[str]]:
        """The adapters that each replica was asked for."""
        return [[start.lora for start in each.scripts["thinker"].requests] for each in (self.stages, self.other)]

    async def load(self, **members: str):
        return await self.http.post("/v1/load_lora_adapter", json=SEA | members)

    async def names(self) -> list[str]:
        return [model["id"] for model in (await self.http.get("/v1/models")).json()["data"]]


@contextlib.asynccontextmanager
async def two_thinkers() -> AsyncIterator[TwoThinkers]:
    async with scripted_stages() as stages, scripted_stages("thinker") as other:
        addresses = stages.addresses | {"thinker": [stages.addresses["thinker"], other.addresses["thinker"]]}
        settings = GatewaySettings(pipeline=PIPELINE, health_timeout_s=HEALTH_TIMEOUT_S, anonymous_admin=True)
        app = create_app(settings, load_pipeline(PIPELINE, addresses))
        async with serving(app, settings) as url:
            gateway = TwoThinkers(app, stages, url)
            gateway.other = other
            replicas = app.state.gateway.pipeline.by_name["thinker"].replicas
            await gateway.until(lambda: len(replicas) == 2 and all(r.serving for r in replicas.values()))
            await gateway.until(lambda: app.state.gateway.pipeline.ready)
            try:
                yield gateway
            finally:
                await gateway.http.aclose()
                await gateway.openai.close()


async def test_an_adapter_is_loaded_everywhere_and_its_requests_go_where_it_is():
    async with two_thinkers() as gateway:
        answer = await gateway.load()
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sea' added successfully.")
        parents = {model["id"]: model["parent"] for model in (await gateway.http.get("/v1/models")).json()["data"]}
        assert parents == {"scripted": None, "sea": "scripted"}
        model = (await gateway.http.get("/v1/models/sea")).json()
        assert (model["parent"], model["root"], model["max_model_len"]) == ("scripted", "scripted", 0)
        for body in ({"model": "sea"}, {"model": "scripted", "lora": "sea"}, {"model": "sea", "lora": "sea"}):
            answer = await gateway.chat(ASK | body)
            assert (answer.status_code, answer.json()["model"]) == (200, body["model"])
        assert list(itertools.chain(*gateway.asked())) == ["sea"] * 3
        # one of the two starts anew, without it
        info = gateway.other.infos["thinker"]
        del info.info.thinker.loras[:]
        info.revision += 1
        stage = gateway.app.state.gateway.pipeline.by_name["thinker"]
        await gateway.until(lambda: sum("sea" in replica.loras for replica in stage.replicas.values()) == 1)
        before = len(gateway.asked()[1])
        for i in range(6):  # each conversation could go to either
            assert (await gateway.chat({"model": "sea"} | _conversation(i))).status_code == 200
        assert len(gateway.asked()[1]) == before
        assert (await gateway.load()).status_code == 200  # once more: where it is missing
        assert len(info.info.thinker.loras) == 1


def _conversation(i: int) -> dict:
    return {"messages": [{"role": "user", "content": f"hi {i}"}]}


async def test_what_one_replica_refuses_no_other_keeps():
    async with two_thinkers() as gateway:
        gateway.other.scripts["thinker"].missing = "sailors"
        answer = await gateway.load()
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "lora_path"
        assert error["message"] == "lora_path: has no adapter_config.json"
        assert await gateway.names() == ["scripted"]
        assert not gateway.stages.infos["thinker"].info.thinker.loras


async def test_an_unloaded_adapter_is_unknown():
    async with two_thinkers() as gateway:
        await gateway.load()
        answer = await gateway.http.post("/v1/unload_lora_adapter", json={"lora_name": "sea"})
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sea' removed successfully.")
        assert await gateway.names() == ["scripted"]
        again = await gateway.http.post("/v1/unload_lora_adapter", json={"lora_name": "sea"})
        assert (again.status_code, again.json()["error"]["param"]) == (404, "lora_name")
        for body, param in (({"model": "sea"}, "model"), ({"model": "scripted", "lora": "sea"}, "lora")):
            status, error = await gateway.refusal(ASK | body)
            assert (status, error["param"], error["code"]) == (404, param, "model_not_found")


async def test_a_replica_whose_adapter_of_that_name_is_another_gets_none_of_its_requests():
    async with two_thinkers() as gateway:
        await gateway.load()
        await gateway.load(lora_name="hill", lora_path="walkers")
        loras = gateway.other.infos["thinker"].info.thinker.loras
        next(lora for lora in loras if lora.name == "sea").digest = "others"
        gateway.other.infos["thinker"].revision += 1
        stage = gateway.app.state.gateway.pipeline.by_name["thinker"]
        await gateway.until(lambda: "others" in [replica.loras["sea"] for replica in stage.replicas.values()])
        for i in range(4):
            assert (await gateway.chat({"model": "sea"} | _conversation(i))).status_code == 200
        asked = gateway.asked()
        assert sorted(map(len, asked)) == [0, 4]


async def test_a_check_that_another_overtakes_takes_nothing_back(monkeypatch: pytest.MonkeyPatch):
    async with two_thinkers() as gateway:
        stage = gateway.app.state.gateway.pipeline.by_name["thinker"]
        replica = next(iter(stage.replicas.values()))
        waits, go_on = asyncio.Event(), asyncio.Event()

        class LateStub(server_info_pb2_grpc.ServerInfoServiceStub):
            def __init__(self, channel: grpc.aio.Channel) -> None:
                super().__init__(channel)
                self._ask, self.GetLoad = self.GetLoad, self._late

            async def _late(self, *asked: Any, **options: Any) -> Any:
                waits.set()
                await go_on.wait()
                return await self._ask(*asked, **options)

        with monkeypatch.context() as patch:
            patch.setattr(server_info_pb2_grpc, "ServerInfoServiceStub", LateStub)
            overtaken = asyncio.create_task(replica.check(HEALTH_TIMEOUT_S))
            await waits.wait()
        await gateway.load()
        go_on.set()
        await overtaken
        assert "sea" in replica.loras


async def test_other_endpoints_take_an_adapter_where_the_thinker_writes():
    async with two_thinkers() as gateway:
        await gateway.load()
        spoken = await gateway.http.post("/v1/audio/speech", json={"model": "sea", "input": "hi", "voice": "ethan"})
        assert (spoken.status_code, spoken.json()["error"]["param"]) == (400, "model")
        assert "'sea' does not do this" in spoken.json()["error"]["message"]
        async with session(gateway, model="sea") as client:
            assert client.created["session"]["model"] == "sea"
            await client.say("hi")
            await client.respond()
        assert list(itertools.chain(*gateway.asked())) == ["sea"]


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"lora_path": ""}, "lora_path"),
        ({"load_inplace": True}, "load_inplace"),
        ({"lora_name": "scripted"}, "lora_name"),
    ],
)
async def test_a_load_that_says_something_wrong(members: dict, param: str):
    async with two_thinkers() as gateway:
        answer = await gateway.load(**members)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_only_administrators_load_adapters(tmp_path: Path):
    async with running() as gateway:
        answer = await gateway.http.post("/v1/load_lora_adapter", json=SEA)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_required")
    user, admin = new_key(), new_key()
    keys = write(tmp_path / "keys.yaml", entry("user", user), entry("admin", admin, admin=True))
    async with running(api_keys_file=keys, anonymous_admin=True) as gateway:
        for path in ("load_lora_adapter", "unload_lora_adapter"):
            refused = await gateway.http.post(f"/v1/{path}", json=SEA, headers=bearer(user))
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_required")
        assert (await gateway.http.post("/v1/load_lora_adapter", json=SEA, headers=bearer(admin))).status_code == 200
        thinker: server_info_pb2.ThinkerInfo = gateway.stages.infos["thinker"].info.thinker
        assert [lora.name for lora in thinker.loras] == ["sea"]
