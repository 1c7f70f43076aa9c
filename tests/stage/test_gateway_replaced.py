"""A gateway that takes the place of another, as in a rollout or after its node: what it serves, and what it knows.

Its settings are those of deploy/k8s: the stages are others, and the directories.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.k8s.kustomize import build
from tests.support.k8s.objects import ROOT, Cluster, pod_of
from tests.support.scripted.stages import ScriptedStages, scripted_stages
from tests.support.systems.stack import free_port

pytestmark = pytest.mark.long
GUARD_S = 120.0
CHAT, SPEECH, RESPONSES = "/v1/chat/completions", "/v1/audio/speech", "/v1/responses"
ASK = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}
ALOUD = ASK | {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "wav"}}
WRITE = {"model": "scripted", "input": "Hello"}
SAY = {"model": "scripted", "input": "Hello", "voice": "ethan"}
JOBS = "/var/lib/quartet/jobs"


class Gateway:
    """A process of `cpu-demo`'s gateway before `stages`, with `directory` as its volume `jobs`."""

    def __init__(self, stages: ScriptedStages, directory: Path) -> None:
        cluster = Cluster(build(ROOT / "deploy/k8s/overlays/cpu-demo"))
        deployed = {name: value.replace(JOBS, str(directory)) for name, value in cluster.environment("gateway").items()}
        assert sum(str(directory) in value for value in deployed.values()) == 4  # videos, voices, files, responses
        self.port = free_port()
        addresses = [f"--stage={stage}={address}" for stage, address in stages.addresses.items()]
        pipeline = directory.parent / "pipeline.yaml"
        pipeline.write_text(cluster.pipeline_text())
        self.command = [sys.executable, "-m", "gateway", f"--port={self.port}", f"--pipeline={pipeline}", *addresses]
        self.environment = deployed | {"QUARTET_GATEWAY_STAGE": "{}", "QUARTET_GATEWAY_HEALTH_TIMEOUT_S": "60"}
        container = pod_of(cluster.get("Deployment", "gateway"))["containers"][0]
        self.startup = container["startupProbe"]["httpGet"]["path"]
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=60, verify=False)

    async def until(self, path: str, status: int) -> httpx.Response:
        """The first answer of GET `path` that has `status`."""
        async with asyncio.timeout(GUARD_S):
            while True:
                try:
                    answer = await self.http.get(path)
                except httpx.TransportError:  # it does not listen yet
                    answer = None
                if answer is not None and answer.status_code == status:
                    return answer
                await asyncio.sleep(0.02)

    async def post(self, path: str, body: dict, status: int) -> httpx.Response:
        """The answer to `body`, which has `status`."""
        answer = await self.http.post(path, json=body)
        assert answer.status_code == status, (path, answer.text)
        return answer


@asynccontextmanager
async def gateway(stages: ScriptedStages, directory: Path) -> AsyncIterator[Gateway]:
    started = Gateway(stages, directory)
    process = await asyncio.create_subprocess_exec(*started.command, env=started.environment)
    try:
        yield started
    finally:
        await started.http.aclose()
        process.terminate()
        await process.wait()


@pytest.fixture
async def stages() -> AsyncIterator[ScriptedStages]:
    """All of them; each stops and starts at its address."""
    async with scripted_stages() as running:
        yield running


async def test_it_serves_what_it_can_and_says_503_of_the_rest(stages: ScriptedStages, tmp_path: Path) -> None:
    for server in stages.servers.values():
        await server.stop(grace=None)
    async with gateway(stages, tmp_path / "jobs") as started:
        # nothing there: the probes hold it back, and who asks all the same gets the API's error
        await started.until("/health", 200)
        waiting = (await started.until(started.startup, 503)).json()
        assert (waiting["status"], waiting["outputs"]) == ("not ready", [])
        assert (await started.post(CHAT, ASK, 503)).json()["error"]["code"] == "stage_unavailable"
        # code2wav without the stages before it: nothing can be had of it yet
        await stages.start("code2wav")
        while (alone := (await started.until(started.startup, 503)).json())["stages"]["code2wav"] != "SERVING":
            await asyncio.sleep(0.02)
        assert (alone["status"], alone["outputs"]) == ("not ready", [])
        # the thinker: text, by any API, and a typed 503 for speech
        await stages.start("thinker")
        partly = (await started.until(started.startup, 200)).json()
        assert (partly["status"], partly["outputs"]) == ("partly ready", ["text"])
        assert (await started.http.get("/ready")).status_code == 503
        assert (await started.post(CHAT, ASK, 200)).json()["choices"][0]["message"]["content"] == "Hello, world"
        assert (await started.post(RESPONSES, WRITE, 200)).json()["status"] == "completed"
        assert [model["id"] for model in (await started.http.get("/v1/models")).json()["data"]] == ["scripted"]
        for path, body in ((CHAT, ALOUD), (SPEECH, SAY)):
            refusal = await started.post(path, body, 503)
            assert refusal.json()["error"]["code"] == "stage_unavailable"
            assert "talker" in refusal.json()["error"]["message"]
            assert refusal.headers["retry-after"] == "1"
        # the last one: everything
        await stages.start("talker")
        assert (await started.until("/ready", 200)).json()["outputs"] == ["text", "speech"]
        assert (await started.post(CHAT, ALOUD, 200)).json()["choices"][0]["message"]["audio"]["data"]
        # and a stage that is lost later takes nothing else along
        await stages.servers["code2wav"].stop(grace=None)
        await started.until("/ready", 503)
        await started.post(CHAT, ASK, 200)
        await started.post(CHAT, ALOUD, 503)


async def test_what_it_knows_of_another_gateways_ids(stages: ScriptedStages, tmp_path: Path) -> None:
    """Nothing beside another gateway, and it says why; all in the place of one whose volume it has."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with gateway(stages, tmp_path / "a/jobs") as first, gateway(stages, tmp_path / "b/jobs") as second:
        for each in (first, second):
            await each.until("/ready", 200)
        response = (await first.post(RESPONSES, WRITE, 200)).json()["id"]
        conversation = (await first.post("/v1/conversations", {}, 200)).json()["id"]
        sound = (await first.post(CHAT, ALOUD, 200)).json()["choices"][0]["message"]["audio"]["id"]
        asked = [
            (404, await second.http.get(f"/v1/responses/{response}")),
            (404, await second.http.get(f"/v1/conversations/{conversation}")),
            (400, await second.http.post(RESPONSES, json=WRITE | {"previous_response_id": response})),
            (404, await second.http.post(RESPONSES, json=WRITE | {"conversation": conversation})),
            (400, await second.http.post(CHAT, json=_after_sound(sound))),
        ]
        for status, answer in asked:
            assert answer.status_code == status
            assert "another gateway's" in answer.json()["error"]["message"]
    async with gateway(stages, tmp_path / "a/jobs") as successor:  # with components/state
        await successor.until("/ready", 200)
        assert (await successor.http.get(f"/v1/responses/{response}")).json()["id"] == response
        assert (await successor.http.get(f"/v1/conversations/{conversation}")).json()["id"] == conversation
        await successor.post(RESPONSES, WRITE | {"previous_response_id": response}, 200)


def _after_sound(sound: str) -> dict:
    said = {"role": "assistant", "audio": {"id": sound}}
    return ASK | {"messages": [*ASK["messages"], said, {"role": "user", "content": "And?"}]}
